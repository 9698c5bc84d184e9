/* fuzz.c: calls all functions of onnxa.h on damaged files.
 *
 * With libFuzzer:
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -DONNXA_LIBFUZZER fuzz.c -o fuzz
 *     ./fuzz COPY_OF_VECTORS
 * With the mutator below, which makes the same files for the same seed:
 *     cc -std=c99 -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all fuzz.c -o fuzz
 *     ./fuzz [--runs N] [--seed N] FILE...
 *
 * onnxa.h compares the CRC-32 of a model or tensor first, and checks the content only if the CRC-32
 * is right. So both mutators often correct the CRC-32s. */
#define ONNXA_IMPLEMENTATION
#include "onnxa.h"

#include "nfc.h"

#include <stdio.h>

static void expect(int holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "expected: %s\n", what);
    abort();
}

/* ---- Memory that is counted, and sometimes denied ---- */

typedef struct counted {
    size_t bytes, calls, denied; /* `denied` is the number of the call that fails, 0 for none */
} counted;

static void *allocate(void *context, size_t size) {
    counted *memory = (counted *)context;
    if (++memory->calls == memory->denied) return NULL;
    memory->bytes += size;
    return malloc(size);
}

static void release(void *context, void *at, size_t size) {
    counted *memory = (counted *)context;
    memory->bytes -= size;
    free(at);
}

static int is_normalized(void *context, const char *name, size_t length) {
    (void)context;
    return nfc_is_normalized(NULL, name, length);
}

/* ---- One file ---- */

static volatile uint64_t sum; /* volatile, so that no compiler removes the reads of touch() */

static void touch(const void *at, size_t size) {
    if (size) sum = sum + ((const uint8_t *)at)[0] + ((const uint8_t *)at)[size - 1];
}

static void expect_error(const onnxa_error *error) {
    expect(error->status != ONNXA_OK, "a status");
    expect((error->status == ONNXA_REFUSED) == (error->rule != NULL), "a rule of a refusal");
    expect(error->message[0] && strlen(error->message) < sizeof error->message - 1, "a message");
    expect(strlen(error->entry) < sizeof error->entry, "an entry");
    expect(strlen(error->tensor) < sizeof error->tensor, "a tensor");
}

/* Uses an open archive in every way; returns whether it passes the full check. */
static int walk(const onnxa *archive, const uint8_t *file, size_t file_size) {
    onnxa_error error;
    size_t i, j, k, listed = 0, linked = 0;
    int whole;
    for (i = 0; i < onnxa_entry_count(archive); i++) {
        const onnxa_entry *entry = onnxa_get_entry(archive, i);
        const onnxa_tensor *tensor = entry->tensors;
        const uint8_t *data = onnxa_entry_data(archive, entry, &error);
        expect(strlen(entry->name) == entry->name_length, "a name without NUL");
        expect(onnxa_find_entry(archive, entry->name, entry->name_length) == entry, "this entry");
        expect(entry->data_offset % 64 == 0, "aligned data");
        expect(entry->data_offset <= file_size && entry->size <= file_size - entry->data_offset,
               "data within the file");
        expect(!tensor == (entry->kind != ONNXA_TENSOR_DATA), "tensors of keys");
        for (; tensor; tensor = tensor->same_data, linked++)
            expect(tensor->entry == entry, "tensors of this entry");
        if (data) {
            expect(data == file + entry->data_offset, "data at its offset");
            touch(data, (size_t)entry->size);
        } else {
            expect_error(&error);
        }
    }
    for (i = 0; i < onnxa_model_count(archive); i++) {
        const onnxa_model *model = onnxa_get_model(archive, i);
        expect(onnxa_find_model(archive, model->id) == model, "this model");
        touch(model->data, (size_t)model->entry->size);
        listed += model->tensor_count;
        for (j = 0; j < model->tensor_count; j++) {
            const onnxa_tensor *tensor = &model->tensors[j], *found;
            uint64_t bytes = onnxa_type_bits(tensor->data_type) < 8
                                 ? 1
                                 : onnxa_type_bits(tensor->data_type) / 8;
            expect(tensor->model == model, "tensors of this model");
            expect(onnxa_type_name(tensor->data_type) != NULL, "a data type");
            expect(tensor->rank <= ONNXA_MAX_DIMS, "a rank");
            for (k = 0; k < tensor->rank; k++) {
                expect(tensor->dims[k] >= 0, "dims");
                if (!tensor->dims[k]) continue;
                expect(bytes <= (uint64_t)INT64_MAX / (uint64_t)tensor->dims[k], "a product");
                bytes *= (uint64_t)tensor->dims[k];
            }
            found = onnxa_find_tensor(archive, model, tensor->name, tensor->name_length);
            expect(found && found <= tensor && found->model == model &&
                       found->name_length == tensor->name_length,
                   "the first tensor of this name");
            touch(tensor->name, tensor->name_length);
            touch(tensor->checksum, tensor->checksum_length);
            if (onnxa_tensor_data(archive, tensor, NULL))
                touch(file + tensor->entry->data_offset, (size_t)tensor->entry->size);
        }
    }
    expect(listed == linked, "as many tensors of models as of entries");
    expect(!onnxa_find_entry(archive, "no/entry", 8), "no entry");
    expect(!onnxa_find_tensor(archive, onnxa_get_model(archive, 0), "no\ntensor\n", 10) || listed,
           "no tensor");
    expect(!onnxa_get_entry(archive, onnxa_entry_count(archive)), "no further entry");
    whole = !onnxa_check(archive, &error);
    if (!whole) expect_error(&error);
    return whole;
}

enum { REFUSED, OPENED, ACCEPTED };

static int read_file(const uint8_t *data, size_t size) {
    counted memory = {0, 0, 0};
    onnxa_options options;
    onnxa_error error;
    onnxa *archive;
    onnxa_status status;
    size_t calls;
    int outcome = REFUSED;
    memset(&options, 0, sizeof options);
    options.allocate = allocate;
    options.release = release;
    options.is_normalized = is_normalized;
    options.context = &memory;
    status = onnxa_open(&archive, data, size, &options, &error);
    calls = memory.calls;
    expect(status == error.status && !status == !!archive, "an archive or an error");
    if (archive) {
        outcome = walk(archive, data, size) ? ACCEPTED : OPENED;
        onnxa_close(archive);
    } else {
        expect_error(&error);
    }
    expect(!memory.bytes, "all memory released");

    memory.denied = 1 + size % (calls + 1); /* one of the allocations fails, or none */
    memory.calls = 0;
    if (onnxa_open(&archive, data, size, &options, &error)) expect_error(&error);
    onnxa_close(archive);
    expect(!memory.bytes, "all memory released after one was denied");

    memory.denied = 0;
    options.max_memory = 4096 + 64 * (size % 1024);
    if (onnxa_open(&archive, data, size, &options, &error)) expect_error(&error);
    expect(memory.bytes <= options.max_memory, "no more memory than the limit");
    onnxa_close(archive);
    expect(!memory.bytes, "all memory released below a limit");

    options.max_memory = 0;
    options.is_normalized = NULL;
    options.accept_undecided_names = size % 2 != 0;
    options.max_model_bytes = size % 512;
    status = onnxa_open(&archive, data, size, &options, &error);
    if (status) expect_error(&error);
    if (outcome != REFUSED && status == ONNXA_REFUSED)
        expect(size % 2 == 0 && !strcmp(error.rule, "ASSET-1"), "a name that is not decided");
    if (outcome != REFUSED) expect(status != ONNXA_NO_MEMORY, "memory");
    onnxa_close(archive);
    return outcome;
}

/* ---- Mutations ---- */

/* Corrects the CRC-32s in the directory records and local headers of a damaged file of at most 64
 * entries. Goes backwards, and stops at an entry that does not fit before the next header. */
static void mend(uint8_t *data, size_t size) {
    static onnxa table; /* for its table alone */
    size_t at, end, next, i, count = 0;
    static size_t records[64];
    if (!table.crc_table[0][1]) onnxa__make_crc_table(&table);
    if (size < ONNXA__END) return;
    end = size - ONNXA__END;
    if (onnxa__u32(data + end + 16) > end) return;
    next = at = onnxa__u32(data + end + 16);
    while (count < 64 && at + ONNXA__RECORD <= end &&
           onnxa__u32(data + at) == ONNXA__SIGNATURE_RECORD) {
        records[count++] = at;
        at += ONNXA__RECORD + onnxa__u16(data + at + 28) + onnxa__u16(data + at + 30) +
              onnxa__u16(data + at + 32);
    }
    while (count--) {
        uint8_t *record = data + records[count];
        size_t header = onnxa__u32(record + 42), bytes = onnxa__u32(record + 24);
        uint32_t crc;
        if (header > next || next - header < ONNXA__LOCAL ||
            bytes > next - header - ONNXA__LOCAL)
            return;
        crc = ~onnxa__crc(&table, 0xFFFFFFFFu, data + (next - bytes), bytes);
        for (i = 0; i < 4; i++)
            record[16 + i] = data[header + 14 + i] = (uint8_t)(crc >> 8 * i & 0xFF);
        next = header;
    }
}

#ifdef ONNXA_LIBFUZZER

#ifdef __cplusplus
extern "C" {
#endif
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t room);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned int seed);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
#ifdef __cplusplus
}
#endif

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t room, unsigned int seed) {
    size = LLVMFuzzerMutate(data, size, room);
    if (seed % 4) mend(data, size);
    return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    read_file(data, size);
    return 0;
}

#else

static uint64_t random_state;

static size_t random_below(size_t limit) { /* xorshift64 */
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return limit ? (size_t)(random_state >> 11) % limit : 0;
}

/* A random offset in one of three parts: the whole file, the directory with the end records, or the
 * 256 bytes before the directory, where the default model ends. */
static size_t place(const uint8_t *data, size_t size) {
    size_t directory = size < 22 ? 0 : onnxa__u32(data + size - 6), part = random_below(3);
    if (part && size && directory < size) {
        size_t begin = directory < 256 ? 0 : directory - 256;
        if (part == 1) return directory + random_below(size - directory);
        if (directory > begin) return begin + random_below(directory - begin);
    }
    return random_below(size);
}

/* Changes a file in place, and returns the new size. `data` has room for 64 more bytes. */
static size_t mutate(uint8_t *data, size_t size, const uint8_t *other, size_t other_size) {
    static const uint8_t values[] = {0,    1,    2,    0x0A, 0x12, 0x40, 0x42, 0x50,
                                     0x6A, 0x70, 0x7F, 0x80, 0xC2, 0xFE, 0xFF};
    size_t changes = 1 + random_below(3), at, count, from, i;
    while (changes-- && size) {
        at = place(data, size);
        switch (random_below(8)) {
        case 0:
        case 1: data[at] = (uint8_t)(data[at] ^ 1u << random_below(8)); break;
        case 2: data[at] = values[random_below(sizeof values)]; break;
        case 3: data[at] = (uint8_t)(data[at] + random_below(9) - 4); break;
        case 4: /* copies bytes within the file */
            from = place(data, size);
            count = random_below(32);
            if (count > size - at) count = size - at;
            if (count > size - from) count = size - from;
            memmove(data + at, data + from, count);
            break;
        case 5: /* copies bytes of another file */
            from = random_below(other_size);
            count = random_below(64);
            if (count > size - at) count = size - at;
            if (count > other_size - from) count = other_size - from;
            if (count) memcpy(data + at, other + from, count);
            break;
        case 6: /* changes a number of 4 bytes by at most 64, or sets all its bits */
            if (size - at < 4) break;
            from = random_below(4) ? onnxa__u32(data + at) + random_below(129) - 64 : SIZE_MAX;
            for (i = 0; i < 4; i++) data[at + i] = (uint8_t)(from >> 8 * i & 0xFF);
            break;
        default: /* cuts or inserts bytes */
            count = random_below(16);
            if (random_below(8)) break; /* not often */
            if (random_below(2)) {
                if (count > size - at) count = size - at;
                memmove(data + at, data + at + count, size - at - count);
                size -= count;
            } else {
                memmove(data + at + count, data + at, size - at);
                memset(data + at, (int)random_below(256), count);
                size += count;
            }
        }
    }
    if (random_below(4)) mend(data, size);
    return size;
}

typedef struct seed_file {
    uint8_t *data;
    size_t size;
} seed_file;

static int load(const char *path, seed_file *file) {
    FILE *in = fopen(path, "rb");
    long size;
    if (!in) return 0;
    if (fseek(in, 0, SEEK_END) || (size = ftell(in)) < 0 || fseek(in, 0, SEEK_SET)) {
        fclose(in);
        return 0;
    }
    file->size = (size_t)size;
    file->data = (uint8_t *)malloc(file->size + 1);
    if (!file->data || fread(file->data, 1, file->size, in) != file->size) {
        fclose(in);
        return 0;
    }
    fclose(in);
    return 1;
}

int main(int argc, char **argv) {
    unsigned long runs = 10000, run, outcomes[3] = {0, 0, 0};
    size_t count = 0, good = 0, i;
    seed_file *files = (seed_file *)calloc((size_t)argc + 1, sizeof *files);
    size_t *accepted = (size_t *)calloc((size_t)argc + 1, sizeof *accepted); /* indices of files */
    random_state = 1;
    if (!files || !accepted) return 2;
    for (i = 1; i < (size_t)argc; i++) {
        if (i + 1 < (size_t)argc && !strcmp(argv[i], "--runs")) {
            runs = strtoul(argv[++i], NULL, 10);
        } else if (i + 1 < (size_t)argc && !strcmp(argv[i], "--seed")) {
            random_state = strtoul(argv[++i], NULL, 10) * 2 + 1;
        } else if (load(argv[i], &files[count])) {
            count++;
        } else {
            fprintf(stderr, "%s cannot be read\n", argv[i]);
            return 2;
        }
    }
    if (!count) {
        fprintf(stderr, "usage: %s [--runs N] [--seed N] FILE...\n", argc ? argv[0] : "fuzz");
        return 2;
    }
    for (i = 0; i < 20; i++) random_below(2);
    for (run = 0; run < runs; run++) {
        /* The first runs read each file as it is, the other runs read damaged copies. Three of four
         * copies are of an accepted file, the fourth is of any file: damage to a refused file
         * seldom shows anything new. */
        size_t chosen = run < count            ? run
                        : good && run % 4 != 0 ? accepted[random_below(good)]
                                               : random_below(count);
        const seed_file *file = &files[chosen], *other = &files[random_below(count)];
        uint8_t *work = (uint8_t *)malloc(file->size + 64), *exact;
        size_t size = file->size;
        int outcome;
        if (!work) return 2;
        memcpy(work, file->data, size);
        if (run >= count) size = mutate(work, size, other->data, other->size);
        /* Without spare bytes, so that a sanitizer finds reads past the end. */
        exact = (uint8_t *)malloc(size ? size : 1);
        if (!exact) return 2;
        memcpy(exact, work, size);
        outcome = read_file(exact, size);
        if (run < count && outcome == ACCEPTED) accepted[good++] = chosen;
        outcomes[outcome]++;
        free(exact);
        free(work);
    }
    printf("%lu files: %lu accepted, %lu opened, %lu refused\n", runs, outcomes[ACCEPTED],
           outcomes[OPENED], outcomes[REFUSED]);
    for (i = 0; i < count; i++) free(files[i].data);
    free(files);
    free(accepted);
    return 0;
}

#endif
