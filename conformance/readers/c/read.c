/* read.c: reads an archive for the conformance suite, and prints JSON (../../README.md).
 *
 *     cc -std=c99 -O2 read.c -o onnxa_read
 *     ./onnxa_read [--open] ARCHIVE
 *
 * Makes the full check. --open only opens the archive, and leaves sha256 out. The exit status is 0
 * if a JSON object was printed, otherwise 2. For POSIX systems. */
#define _POSIX_C_SOURCE 200809L
#define _FILE_OFFSET_BITS 64

#define ONNXA_IMPLEMENTATION
#include "onnxa.h"

#include "nfc.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- JSON ---- */

/* The length of the UTF-8 sequence at the start of `text`. If the sequence is ill-formed, sets
 * *whole to 0 and returns the length of its maximal subpart (Unicode, section 3.9); otherwise sets
 * *whole to 1. */
static size_t subpart(const uint8_t *text, size_t length, int *whole) {
    uint8_t low = 0x80, high = 0xBF;
    size_t size = 1, expected = text[0] < 0x80 ? 1 : text[0] < 0xE0 ? 2 : text[0] < 0xF0 ? 3 : 4;
    *whole = 0;
    if ((text[0] >= 0x80 && text[0] < 0xC2) || text[0] > 0xF4) return 1;
    if (text[0] == 0xE0) low = 0xA0;
    if (text[0] == 0xED) high = 0x9F;
    if (text[0] == 0xF0) low = 0x90;
    if (text[0] == 0xF4) high = 0x8F;
    for (; size < expected && size < length; size++) {
        if (text[size] < low || text[size] > high) return size;
        low = 0x80;
        high = 0xBF;
    }
    *whole = size == expected;
    return size;
}

static void print_text(const char *text, size_t length) {
    size_t i, size;
    int whole;
    putchar('"');
    for (i = 0; i < length; i += size) {
        unsigned char c = (unsigned char)text[i];
        size = subpart((const uint8_t *)text + i, length - i, &whole);
        if (!whole)
            fputs("\xEF\xBF\xBD", stdout);
        else if (c < 0x20 || c == 0x7F)
            printf("\\u%04x", c);
        else if (c == '"' || c == '\\')
            printf("\\%c", c);
        else
            fwrite(text + i, 1, size, stdout);
    }
    putchar('"');
}

/* Numbers from 2^53 on are printed as strings. */
static void print_number(uint64_t number) {
    const char *quote = number >> 53 ? "\"" : "";
    printf("%s%llu%s", quote, (unsigned long long)number, quote);
}

static int print_refusal(const onnxa_error *error) {
    if (error->status == ONNXA_REFUSED) {
        printf("{\"accepted\": false, \"rule\": \"%s\", \"entry\": ", error->rule);
        if (error->entry[0])
            print_text(error->entry, strlen(error->entry));
        else
            fputs("null", stdout);
    } else {
        fputs("{\"accepted\": null", stdout);
    }
    fputs(", \"message\": ", stdout);
    print_text(error->message, strlen(error->message));
    puts("}");
    return 0;
}

static int refuse_file(const char *what) {
    printf("{\"accepted\": false, \"rule\": \"FILE-1\", \"entry\": null, \"message\": \"%s\"}\n",
           what);
    return 0;
}

/* ---- SHA-256 (FIPS 180-4) ---- */

static uint32_t rotated(uint32_t value, unsigned by) { return value >> by | value << (32 - by); }

static void sha256_block(uint32_t state[8], const uint8_t *block) {
    static const uint32_t k[64] = {
        0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
        0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
        0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
        0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
        0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
        0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
        0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
        0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
        0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
        0xc67178f2};
    uint32_t w[64], s[8];
    unsigned i;
    for (i = 0; i < 16; i++, block += 4)
        w[i] = (uint32_t)block[0] << 24 | (uint32_t)block[1] << 16 | (uint32_t)block[2] << 8 |
               (uint32_t)block[3];
    for (; i < 64; i++)
        w[i] = w[i - 16] + w[i - 7] +
               (rotated(w[i - 15], 7) ^ rotated(w[i - 15], 18) ^ w[i - 15] >> 3) +
               (rotated(w[i - 2], 17) ^ rotated(w[i - 2], 19) ^ w[i - 2] >> 10);
    memcpy(s, state, sizeof s);
    for (i = 0; i < 64; i++) {
        uint32_t first = s[7] + (rotated(s[4], 6) ^ rotated(s[4], 11) ^ rotated(s[4], 25)) +
                         ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
        uint32_t second = (rotated(s[0], 2) ^ rotated(s[0], 13) ^ rotated(s[0], 22)) +
                          ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
        s[7] = s[6];
        s[6] = s[5];
        s[5] = s[4];
        s[4] = s[3] + first;
        s[3] = s[2];
        s[2] = s[1];
        s[1] = s[0];
        s[0] = first + second;
    }
    for (i = 0; i < 8; i++) state[i] += s[i];
}

static void print_sha256(const uint8_t *data, size_t size) {
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    uint8_t end[128] = {0};
    size_t left = size % 64, blocks = left < 56 ? 64 : 128, i;
    for (i = 0; i + 64 <= size; i += 64) sha256_block(state, data + i);
    if (left) memcpy(end, data + i, left);
    end[left] = 0x80;
    for (i = 0; i < 8; i++) end[blocks - 1 - i] = (uint8_t)((uint64_t)size << 3 >> 8 * i & 0xFF);
    sha256_block(state, end);
    if (blocks == 128) sha256_block(state, end + 64);
    for (i = 0; i < 8; i++) printf("%08lx", (unsigned long)state[i]);
}

/* ---- The command ---- */

static void print_archive(const onnxa *archive, int with_data) {
    size_t i, j, k;
    const char *between = "";
    fputs("{\"accepted\": true, \"entries\": [", stdout);
    for (i = 0; i < onnxa_entry_count(archive); i++) {
        const onnxa_entry *entry = onnxa_get_entry(archive, i);
        printf("%s\n  {\"name\": ", i ? "," : "");
        print_text(entry->name, entry->name_length);
        fputs(", \"header_offset\": ", stdout);
        print_number(entry->header_offset);
        fputs(", \"data_offset\": ", stdout);
        print_number(entry->data_offset);
        fputs(", \"nbytes\": ", stdout);
        print_number(entry->size);
        printf(", \"crc32\": %lu}", (unsigned long)entry->crc32);
    }
    fputs("\n], \"tensors\": [", stdout);
    for (i = 0; i < onnxa_model_count(archive); i++) {
        const onnxa_model *model = onnxa_get_model(archive, i);
        for (j = 0; j < model->tensor_count; j++, between = ",") {
            const onnxa_tensor *tensor = &model->tensors[j];
            printf("%s\n  {\"model\": \"%s\", \"key\": \"%s\", \"name\": ", between, model->id,
                   tensor->entry->name);
            print_text(tensor->name, tensor->name_length);
            printf(", \"data_type\": %d, \"dims\": [", tensor->data_type);
            for (k = 0; k < tensor->rank; k++) {
                if (k) fputs(", ", stdout);
                print_number((uint64_t)tensor->dims[k]);
            }
            putchar(']');
            if (with_data) {
                const uint8_t *data = onnxa_tensor_data(archive, tensor, NULL);
                fputs(", \"sha256\": \"", stdout);
                if (data) print_sha256(data, (size_t)tensor->entry->size);
                putchar('"');
            }
            putchar('}');
        }
    }
    puts("\n]}");
}

static int read_archive(const void *data, size_t size, int full) {
    onnxa *archive;
    onnxa_options options;
    onnxa_error error;
    memset(&options, 0, sizeof options);
    options.is_normalized = nfc_is_normalized;
    if (onnxa_open(&archive, data, size, &options, &error)) return print_refusal(&error);
    if (full && onnxa_check(archive, &error))
        print_refusal(&error);
    else
        print_archive(archive, full);
    onnxa_close(archive);
    return 0;
}

int main(int argc, char **argv) {
    int full = !(argc == 3 && !strcmp(argv[1], "--open")), file, status;
    const char *path;
    struct stat about;
    void *map;
    if (argc != (full ? 2 : 3)) {
        fprintf(stderr, "usage: %s [--open] ARCHIVE\n", argc ? argv[0] : "onnxa_read");
        return 2;
    }
    path = argv[argc - 1];
    file = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC | O_NOCTTY); /* waits for no pipe */
    if (file < 0) {
        if (!stat(path, &about) && !S_ISREG(about.st_mode)) return refuse_file("no regular file");
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return 2;
    }
    if (fstat(file, &about)) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return 2;
    }
    if (!S_ISREG(about.st_mode)) return refuse_file("no regular file");
    if (!about.st_size) return read_archive("", 0, full); /* it cannot be mapped */
    if ((uint64_t)about.st_size > SIZE_MAX) {
        puts("{\"accepted\": null, \"message\": \"the file is larger than the address space\"}");
        return 0;
    }
    map = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    if (map == MAP_FAILED) {
        fprintf(stderr, "%s: %s\n", path, strerror(errno));
        return 2;
    }
    status = read_archive(map, (size_t)about.st_size, full);
    munmap(map, (size_t)about.st_size);
    return status;
}
