// Runs the first input of an archive's model, all ones, and prints the sum of its first output.
#define ONNXA_IMPLEMENTATION
#include <onnxa_ort.hpp>

#include <iostream>
#include <numeric>

int main(int count, char **arguments) try {
    if (count < 2) throw std::runtime_error("expected: run ARCHIVE [MODEL]");
    Ort::Env env;
    Ort::SessionOptions options;
    options.SetIntraOpNumThreads(1);
    options.AddConfigEntry("session.disable_prepacking", "1");  // share the weights
    onnxa_ort::Archive archive(arguments[1]);
    Ort::Session session = archive.session(env, options, count > 2 ? arguments[2] : "");

    Ort::AllocatorWithDefaultOptions allocator;
    auto input = session.GetInputNameAllocated(0, allocator);
    auto output = session.GetOutputNameAllocated(0, allocator);
    auto shape = session.GetInputTypeInfo(0).GetTensorTypeAndShapeInfo().GetShape();
    for (auto &size : shape) size = size < 0 ? 1 : size;  // open dimensions
    std::vector<float> ones(std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>()), 1);
    auto x = Ort::Value::CreateTensor<float>(Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault),
                                             ones.data(), ones.size(), shape.data(), shape.size());
    const char *inputs[] = {input.get()}, *outputs[] = {output.get()};
    auto results = session.Run(Ort::RunOptions(), inputs, &x, 1, outputs, 1);
    const float *y = results[0].GetTensorData<float>();
    std::cout << std::accumulate(y, y + results[0].GetTensorTypeAndShapeInfo().GetElementCount(), 0.0) << '\n';
} catch (const std::exception &error) {
    std::cerr << error.what() << '\n';
    return 1;
}
