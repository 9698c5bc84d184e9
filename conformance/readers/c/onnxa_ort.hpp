// onnxa_ort.hpp: sessions of ONNX Runtime over ONNX archives, in C++17.
//
// Needs onnxa.h beside it (with ONNXA_IMPLEMENTATION in one file) and the C++ header of ONNX Runtime
// 1.18 or newer.
//
// The archive is mapped, and the weights are buffers in the map. ONNX Runtime 1.31 and newer use them
// in place, so that processes share them; older ones copy them. Tensors in subgraphs, and those that
// shape inference reads, such as the shape of a Reshape, must be in the model itself: writers keep
// tensors of less than 1,024 bytes there.
#ifndef ONNXA_ORT_HPP
#define ONNXA_ORT_HPP

#include <onnxruntime_cxx_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "onnxa.h"

#ifdef _WIN32
#include <cstdio>
#else
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace onnxa_ort {

// The bytes of a regular file: a private map, or on Windows a copy in memory. If another process
// truncates a mapped file, touching the lost pages ends this process.
class File {
  public:
    explicit File(const std::string &path) {
#ifdef _WIN32
        std::FILE *file = std::fopen(path.c_str(), "rb");
        if (!file) throw std::runtime_error(path + ": cannot be opened");
        _fseeki64(file, 0, SEEK_END);
        const long long end = _ftelli64(file);
        size_ = end < 0 ? 0 : static_cast<std::size_t>(end);
        data_ = _aligned_malloc(size_ ? size_ : 1, 64);
        _fseeki64(file, 0, SEEK_SET);
        const bool is_read = end >= 0 && data_ && std::fread(data_, 1, size_, file) == size_;
        std::fclose(file);
        if (!is_read) {
            _aligned_free(data_);
            throw std::runtime_error(path + ": cannot be read");
        }
#else
        const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
        if (file < 0) throw std::runtime_error(path + ": cannot be opened");
        struct stat status;
        const bool is_regular = !::fstat(file, &status) && S_ISREG(status.st_mode);
        size_ = is_regular ? static_cast<std::size_t>(status.st_size) : 0;
        data_ = size_ ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
        ::close(file);
        if (data_ == MAP_FAILED)
            throw std::runtime_error(path + (is_regular ? ": cannot be mapped" : ": no regular file"));
#endif
    }
    ~File() {
#ifdef _WIN32
        _aligned_free(data_);
#else
        ::munmap(data_, size_);
#endif
    }
    File(const File &) = delete;
    File &operator=(const File &) = delete;
    const void *data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    void *data_ = nullptr;
    std::size_t size_ = 0;
};

// An open archive. It must outlive its sessions.
class Archive {
  public:
    // Throws std::runtime_error if the file cannot be read, or breaks a rule of the specification.
    explicit Archive(const std::string &path) : path_(path), file_(path) {
        onnxa *opened = nullptr;
        onnxa_error error;
        if (onnxa_open(&opened, file_.data(), file_.size(), nullptr, &error)) refuse(error);
        archive_.reset(opened);
    }

    // A session of the model with an id, "" for the default one. The options are changed: they get
    // the buffers of the weights. Throws std::runtime_error, or Ort::Exception.
    Ort::Session session(Ort::Env &env, Ort::SessionOptions &options, const std::string &id = "") {
        const onnxa_model *model = onnxa_find_model(archive_.get(), id.c_str());
        if (!model) throw std::runtime_error(path_ + ": no model has the id '" + id + "'");
        std::vector<std::basic_string<ORTCHAR_T>> names;
        std::vector<char *> buffers;
        std::vector<std::size_t> sizes;
        onnxa_error error;
        for (std::size_t i = 0; i < model->tensor_count; ++i) {
            const onnxa_tensor &tensor = model->tensors[i];
            const std::uint8_t *data = onnxa_tensor_data(archive_.get(), &tensor, &error);
            if (!data) refuse(error);
            names.emplace_back(tensor.entry->name, tensor.entry->name + tensor.entry->name_length);
            buffers.push_back(const_cast<char *>(reinterpret_cast<const char *>(data)));
            sizes.push_back(static_cast<std::size_t>(tensor.entry->size));
        }
        options.AddConfigEntry("session.use_external_initializer_file_buffers_directly", "1");
        if (!names.empty())
            options.AddExternalInitializersFromFilesInMemory(names, buffers, sizes);
        return Ort::Session(env, model->data, static_cast<std::size_t>(model->entry->size), options);
    }

    const onnxa *get() const { return archive_.get(); }

  private:
    [[noreturn]] void refuse(const onnxa_error &error) const {
        throw std::runtime_error(path_ + ": " + error.message +
                                 (error.rule ? std::string(" [") + error.rule + "]" : ""));
    }
    struct Close {
        void operator()(onnxa *archive) const { onnxa_close(archive); }
    };
    std::string path_;
    File file_;
    std::unique_ptr<onnxa, Close> archive_;
};

}  // namespace onnxa_ort

#endif  // ONNXA_ORT_HPP
