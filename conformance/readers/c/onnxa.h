/* onnxa.h: reads ONNX archives (.onnxa), as ../../../spec/specification.md describes them.
 *
 * One header of C99 or C++11 that needs nothing but the standard library. Write
 *
 *     #define ONNXA_IMPLEMENTATION
 *     #include "onnxa.h"
 *
 * in one file, and include it without the macro in others.
 *
 * An archive is opened over memory: a map of a file, or a buffer. Opening checks every rule of the
 * stage "open" (section 9.1 of the specification) except FILE-1, and copies only the central
 * directory. Tensors and names of tensors are views of that memory, which has to stay until the
 * archive is closed. The header of an entry is checked before its data is given out. A full check,
 * which reads every byte, is made on request.
 *
 * What onnxa.h promises, for any bytes:
 * - It reads nothing outside the memory, and has no undefined behaviour.
 * - If another process changes the memory meanwhile, the answers may be wrong. But a length that
 *   is read again is checked again, so that all reads still lie within the memory.
 * - It compares each size with the size of the memory before it reads or allocates. It takes memory
 *   in proportion to the size of the central directory and the number of external tensors, up to a
 *   limit that you may set.
 * - To read n bytes it takes time in proportion to n log n, whatever the content.
 * - Its recursion is at most about a hundred calls deep.
 * - An open archive does not change, so several threads may read it.
 *
 * You open the file, check that it is a regular one (FILE-1), and map it. If a mapped file is
 * truncated, touching the lost pages ends the process (SIGBUS).
 *
 * The data of a tensor is little-endian, and begins at a multiple of 64 bytes of the file. So in a
 * map, or in a buffer that is itself aligned, you may cast the pointer on a little-endian machine.
 */
#ifndef ONNXA_H
#define ONNXA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* To declare the functions in another way, define ONNXA_DEF before the #include, for example as
 * static or as __declspec(dllexport). */
#ifndef ONNXA_DEF
#define ONNXA_DEF extern
#endif

#define ONNXA_MAX_DIMS 64
#define ONNXA_MAX_NAME 1024 /* bytes of the name of an entry */

typedef enum onnxa_status {
    ONNXA_OK = 0,
    ONNXA_REFUSED,   /* the file breaks a rule: onnxa_error.rule */
    ONNXA_NO_MEMORY, /* an allocation failed */
    ONNXA_LIMIT      /* the file asks for more than a limit of onnxa_options; it may conform */
} onnxa_status;

typedef struct onnxa_error {
    onnxa_status status;
    const char *rule;               /* the id of a broken rule, such as "ZIP-6", or NULL */
    char message[200];              /* what is wrong, in ASCII; holds no text of the file */
    char entry[ONNXA_MAX_NAME + 1]; /* the name of the entry, "" if none is concerned */
    char tensor[256];               /* the start of the tensor's name, "" if none is concerned */
} onnxa_error;
/* `entry` and `tensor` come from the file. Control characters of ASCII are shown as "?"; the
 * other bytes need not be UTF-8. */

typedef struct onnxa_options {
    /* Memory: give both functions or none; none means malloc and free. */
    void *(*allocate)(void *context, size_t size);
    void (*release)(void *context, void *memory, size_t size);
    /* Says whether a name is in Normalization Form C and has assigned code points only, by
     * Unicode 13.0 or later (ASSET-1). The name is well-formed UTF-8, without a NUL at its end,
     * and has a byte above 0x7F. Without this function, such names remain undecided. */
    int (*is_normalized)(void *context, const char *name, size_t length);
    void *context; /* given to the three functions above */
    /* Undecided names: 0 refuses them by ASSET-1, as the specification demands; 1 accepts them,
     * for callers that make no files with these names. */
    int accept_undecided_names;
    /* Limits for files that are not trusted; 0 means none. */
    size_t max_memory;        /* bytes allocated at the same time */
    uint64_t max_model_bytes; /* sizes of all models together */
} onnxa_options;

typedef enum onnxa_kind { ONNXA_TENSOR_DATA, ONNXA_ASSET, ONNXA_MODEL } onnxa_kind;

typedef struct onnxa onnxa;
typedef struct onnxa_entry onnxa_entry;
typedef struct onnxa_model onnxa_model;
typedef struct onnxa_tensor onnxa_tensor;

/* A file in the zip. */
struct onnxa_entry {
    const char *name; /* well-formed UTF-8 without control characters, with a NUL at its end */
    size_t name_length;
    onnxa_kind kind;
    uint32_t crc32;
    uint64_t header_offset;
    uint64_t data_offset;
    uint64_t size;               /* at most SIZE_MAX */
    const onnxa_tensor *tensors; /* the first tensor that has this data, NULL if there is none */
    const uint8_t *record;       /* internal: its directory record */
};

/* A model: the ModelProto is the data of its entry, checked and ready to be parsed. */
struct onnxa_model {
    const char *id; /* "" for the default model */
    const onnxa_entry *entry;
    const uint8_t *data; /* entry->size bytes */
    const onnxa_tensor *tensors;
    size_t tensor_count; /* external tensors only */
};

/* An external tensor of a model. */
struct onnxa_tensor {
    const char *name; /* as in the model: any bytes, or none; no NUL at the end */
    size_t name_length;
    const onnxa_model *model;
    const onnxa_entry *entry; /* its data; the name of the entry is the key */
    int data_type;            /* a number of section 8.2, one that onnxa_type_bits knows */
    size_t rank;              /* at most ONNXA_MAX_DIMS */
    const int64_t *dims;      /* none negative; sizes and strides in bytes fit int64_t (TENSOR-2) */
    const char *checksum;     /* in external_data, NULL if missing; the full check compares it */
    size_t checksum_length;
    const onnxa_tensor *same_data; /* the next tensor with this entry, in another model, or NULL */
};

/* Opens an archive over `size` bytes. On success sets *archive, which onnxa_close releases. On
 * failure sets *archive to NULL, and describes the failure in *error. `options` and `error` may be
 * NULL. */
ONNXA_DEF onnxa_status onnxa_open(onnxa **archive, const void *data, size_t size,
                                  const onnxa_options *options, onnxa_error *error);
ONNXA_DEF void onnxa_close(onnxa *archive);

/* Entries, in the order of the directory. */
ONNXA_DEF size_t onnxa_entry_count(const onnxa *archive);
ONNXA_DEF const onnxa_entry *onnxa_get_entry(const onnxa *archive, size_t index);
ONNXA_DEF const onnxa_entry *onnxa_find_entry(const onnxa *archive, const char *name,
                                              size_t length);

/* Models: 0 is the default model, further ones follow in ascending order of their ids. */
ONNXA_DEF size_t onnxa_model_count(const onnxa *archive);
ONNXA_DEF const onnxa_model *onnxa_get_model(const onnxa *archive, size_t index);
ONNXA_DEF const onnxa_model *onnxa_find_model(const onnxa *archive, const char *id);

/* The model's first external tensor with this name, in the order of the walk (section 8.1).
 * NULL if there is none. */
ONNXA_DEF const onnxa_tensor *onnxa_find_tensor(const onnxa *archive, const onnxa_model *model,
                                                const char *name, size_t length);

/* The data of an entry, entry->size bytes of the memory. Checks the local header (stage "header").
 * NULL if the header breaks a rule. `error` may be NULL. */
ONNXA_DEF const uint8_t *onnxa_entry_data(const onnxa *archive, const onnxa_entry *entry,
                                          onnxa_error *error);
ONNXA_DEF const uint8_t *onnxa_tensor_data(const onnxa *archive, const onnxa_tensor *tensor,
                                           onnxa_error *error);

/* The full check of an entry, or of all entries: header, CRC-32, and for tensors ONNX's checksum,
 * unused bits and the values of BOOL (stage "data"). Reads every byte. */
ONNXA_DEF onnxa_status onnxa_check_entry(const onnxa *archive, const onnxa_entry *entry,
                                         onnxa_error *error);
ONNXA_DEF onnxa_status onnxa_check(const onnxa *archive, onnxa_error *error);

/* The name of a data type, such as "FLOAT", and the bits of one element in the archive.
 * NULL and 0 for a number that is no data type of external tensors. */
ONNXA_DEF const char *onnxa_type_name(int data_type);
ONNXA_DEF unsigned onnxa_type_bits(int data_type);

#ifdef __cplusplus
}
#endif
#endif /* ONNXA_H */

#ifdef ONNXA_IMPLEMENTATION
#ifndef ONNXA_IMPLEMENTED
#define ONNXA_IMPLEMENTED

#include <stdlib.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Limits and records of the format ---- */

#define ONNXA__MAX_ENTRIES 262144u
#define ONNXA__MAX_MESSAGES 4194304u
#define ONNXA__MAX_DEPTH 100
#define ONNXA__TAIL 65633u    /* the last bytes, in which ZIP-16 forbids false records */
#define ONNXA__END 22u        /* an end record */
#define ONNXA__LOCATOR 20u    /* a Zip64 locator */
#define ONNXA__ALL_ENDS 98u   /* a Zip64 end record, its locator and an end record */
#define ONNXA__RECORD 46u     /* a directory record without name */
#define ONNXA__MAX_RECORD 1098u
#define ONNXA__LOCAL 30u      /* a local header without name */
#define ONNXA__ALIGNMENT 6u   /* an alignment field without padding */
#define ONNXA__ZIP64_SIZES 20u /* a Zip64 field of two sizes */
#define ONNXA__MAX_PADDING 32767u
#define ONNXA__NONE 0xFFFFFFFFu

#define ONNXA__SIGNATURE_LOCAL 0x04034B50u
#define ONNXA__SIGNATURE_RECORD 0x02014B50u
#define ONNXA__SIGNATURE_END 0x06054B50u
#define ONNXA__SIGNATURE_END64 0x06064B50u
#define ONNXA__SIGNATURE_LOCATOR 0x07064B50u

typedef struct onnxa__block {
    struct onnxa__block *next;
    size_t size, used; /* in bytes, this header included */
} onnxa__block;

struct onnxa {
    onnxa_options options;
    size_t allocated;
    const uint8_t *data;
    uint64_t size;
    uint64_t ends; /* the offset of the first end record, where the directory ends */
    uint64_t directory_offset;
    size_t directory_size;
    uint8_t *directory; /* a copy, and a spare byte for the NUL of the last name */
    size_t count;
    onnxa_entry *entries;
    uint32_t *by_name; /* indices of entries, in the order of onnxa__compare_names */
    uint32_t *last;    /* during the walk: the index of each entry's last tensor, or ONNXA__NONE */
    size_t model_count;
    onnxa_model *models;
    size_t tensor_count, tensor_capacity;
    onnxa_tensor *tensors;
    uint32_t *by_tensor_name; /* indices of tensors by model, ordered by onnxa__compare_tensors */
    onnxa__block *blocks;     /* the dims of all tensors */
    uint64_t messages;        /* of all models so far */
    uint32_t crc_table[8][256];
};

/* ---- Numbers ---- */

static uint32_t onnxa__u16(const uint8_t *at) {
    return (uint32_t)at[0] | (uint32_t)at[1] << 8;
}

static uint32_t onnxa__u32(const uint8_t *at) {
    return onnxa__u16(at) | onnxa__u16(at + 2) << 16;
}

static uint64_t onnxa__u64(const uint8_t *at) {
    return (uint64_t)onnxa__u32(at) | (uint64_t)onnxa__u32(at + 4) << 32;
}

/* ---- Refusals ---- */

static void onnxa__show(char *to, size_t room, const char *from, size_t length) {
    size_t i;
    if (length > room - 1) length = room - 1;
    for (i = 0; i < length; i++) {
        unsigned char c = (unsigned char)from[i];
        to[i] = c < 0x20 || c == 0x7F ? '?' : from[i];
    }
    to[length] = 0;
}

/* Writes `text`, with the two numbers in place of the first and the second "%". */
static void onnxa__write(char *to, size_t room, const char *text, uint64_t first, uint64_t second) {
    size_t used = 0;
    for (; *text && used + 1 < room; text++) {
        char digits[20];
        size_t count = 0;
        if (*text != '%') {
            to[used++] = *text;
            continue;
        }
        do {
            digits[count++] = (char)('0' + (int)(first % 10));
            first /= 10;
        } while (first);
        while (count && used + 1 < room) to[used++] = digits[--count];
        first = second;
    }
    to[used] = 0;
}

static onnxa_status onnxa__fail(onnxa_error *error, onnxa_status status, const char *rule,
                                const onnxa_entry *entry, const char *text, uint64_t first,
                                uint64_t second) {
    error->status = status;
    error->rule = rule;
    error->entry[0] = error->tensor[0] = 0;
    if (entry) onnxa__show(error->entry, sizeof error->entry, entry->name, entry->name_length);
    onnxa__write(error->message, sizeof error->message, text, first, second);
    return status;
}

/* Reports a broken rule. `entry` is the entry that breaks the rule, or NULL for the whole file. */
static onnxa_status onnxa__refuse(onnxa_error *error, const char *rule, const onnxa_entry *entry,
                                  const char *text, uint64_t first, uint64_t second) {
    return onnxa__fail(error, ONNXA_REFUSED, rule, entry, text, first, second);
}

static onnxa_status onnxa__no_memory(const onnxa *a, onnxa_error *error, uint64_t size) {
    if (a->options.max_memory && size > a->options.max_memory - a->allocated)
        return onnxa__fail(error, ONNXA_LIMIT, NULL, NULL,
                           "% more bytes of memory exceed the limit of the caller, % bytes", size,
                           a->options.max_memory);
    return onnxa__fail(error, ONNXA_NO_MEMORY, NULL, NULL, "% bytes cannot be allocated", size, 0);
}

/* ---- Memory ---- */

static void *onnxa__allocate(onnxa *a, size_t count, size_t size) {
    void *memory;
    size_t bytes;
    if (count > SIZE_MAX / size) return NULL;
    bytes = count * size;
    if (!bytes) bytes = 1;
    if (a->options.max_memory && bytes > a->options.max_memory - a->allocated) return NULL;
    memory = a->options.allocate ? a->options.allocate(a->options.context, bytes) : malloc(bytes);
    if (memory) a->allocated += bytes;
    return memory;
}

static void onnxa__release(onnxa *a, void *memory, size_t count, size_t size) {
    size_t bytes = count * size;
    if (!memory) return;
    if (!bytes) bytes = 1;
    a->allocated -= bytes;
    if (a->options.allocate)
        a->options.release(a->options.context, memory, bytes);
    else
        free(memory);
}

static size_t onnxa__next_block_size(const onnxa *a) {
    return a->tensor_count < 64 ? 4096 : 65536; /* 64 dims are 512 bytes */
}

/* Allocates memory for `count` dims. The memory is never moved, and onnxa_close releases it. */
static int64_t *onnxa__allocate_dims(onnxa *a, size_t count) {
    size_t header = (sizeof(onnxa__block) + 7) / 8 * 8, bytes = count * sizeof(int64_t);
    onnxa__block *block = a->blocks;
    if (!block || block->size - block->used < bytes) {
        size_t size = onnxa__next_block_size(a);
        block = (onnxa__block *)onnxa__allocate(a, size, 1);
        if (!block) return NULL;
        block->next = a->blocks;
        block->size = size;
        block->used = header;
        a->blocks = block;
    }
    block->used += bytes;
    return (int64_t *)(void *)((uint8_t *)block + (block->used - bytes));
}

/* ---- Order: a stable merge sort, which takes n log n steps whatever the names ---- */

typedef int onnxa__order(const onnxa *a, uint32_t left, uint32_t right);

static void onnxa__sort(const onnxa *a, uint32_t *items, uint32_t *spare, size_t count,
                        onnxa__order *order) {
    uint32_t *from = items, *to = spare, *swap;
    size_t width, begin;
    for (width = 1; width < count; width *= 2) {
        for (begin = 0; begin < count; begin += 2 * width) {
            size_t middle = count - begin < width ? count : begin + width;
            size_t end = count - middle < width ? count : middle + width;
            size_t left = begin, right = middle, at = begin;
            if (middle == end || order(a, from[middle - 1], from[middle]) <= 0) {
                memcpy(to + begin, from + begin, (end - begin) * sizeof *to);
                continue;
            }
            while (left < middle && right < end)
                to[at++] = order(a, from[left], from[right]) <= 0 ? from[left++] : from[right++];
            while (left < middle) to[at++] = from[left++];
            while (right < end) to[at++] = from[right++];
        }
        swap = from;
        from = to;
        to = swap;
    }
    if (from != items) memcpy(items, from, count * sizeof *items);
}

/* How a byte of a name compares: down-cased, "/" before all others. So the names in a folder come
 * directly after a name that equals the folder. Names hold no byte 0. */
static unsigned onnxa__rank(char c) {
    unsigned char byte = (unsigned char)c;
    if (byte >= 'A' && byte <= 'Z') return byte + 32u;
    return byte == '/' ? 0 : byte;
}

static int onnxa__compare_names(const char *left, size_t left_length, const char *right,
                                size_t right_length) {
    size_t i = 0, length = left_length < right_length ? left_length : right_length;
    while (length - i >= 8 && !memcmp(left + i, right + i, 8)) i += 8;
    for (; i < length; i++) {
        unsigned l = onnxa__rank(left[i]), r = onnxa__rank(right[i]);
        if (l != r) return l < r ? -1 : 1;
    }
    return left_length < right_length ? -1 : left_length > right_length;
}

static int onnxa__compare_entries(const onnxa *a, uint32_t left, uint32_t right) {
    const onnxa_entry *l = &a->entries[left], *r = &a->entries[right];
    return onnxa__compare_names(l->name, l->name_length, r->name, r->name_length);
}

static int onnxa__compare_bytes(const char *left, size_t left_length, const char *right,
                                size_t right_length) {
    if (left_length != right_length) return left_length < right_length ? -1 : 1;
    return left_length ? memcmp(left, right, left_length) : 0;
}

static int onnxa__compare_tensors(const onnxa *a, uint32_t left, uint32_t right) {
    const onnxa_tensor *l = &a->tensors[left], *r = &a->tensors[right];
    return onnxa__compare_bytes(l->name, l->name_length, r->name, r->name_length);
}

/* ---- The end records: ZIP-2 to ZIP-5, ZIP64-1 to ZIP64-3 ---- */

static onnxa_status onnxa__read_ends(onnxa *a, onnxa_error *error) {
    const uint8_t *end, *locator;
    uint64_t here, count, size, offset;
    unsigned saturated;
    if (a->size < ONNXA__END)
        return onnxa__refuse(error, "ZIP-2", NULL, "the file has % bytes, an end record has %",
                             a->size, ONNXA__END);
    end = a->data + (a->size - ONNXA__END);
    if (onnxa__u32(end) != ONNXA__SIGNATURE_END)
        return onnxa__refuse(error, "ZIP-2", NULL, "no end record at %, % bytes before the end",
                             a->size - ONNXA__END, ONNXA__END);
    if (onnxa__u16(end + 20))
        return onnxa__refuse(error, "ZIP-2", NULL,
                             "the end record states a comment of % bytes, expected none",
                             onnxa__u16(end + 20), 0);
    if (onnxa__u16(end + 4) || onnxa__u16(end + 6))
        return onnxa__refuse(error, "ZIP-3", NULL,
                             "the disk numbers of the end record are % and %, expected 0",
                             onnxa__u16(end + 4), onnxa__u16(end + 6));
    here = onnxa__u16(end + 8);
    count = onnxa__u16(end + 10);
    size = onnxa__u32(end + 12);
    offset = onnxa__u32(end + 16);
    a->ends = a->size - ONNXA__END;
    locator = a->size >= ONNXA__END + ONNXA__LOCATOR ? end - ONNXA__LOCATOR : NULL;
    if (locator && onnxa__u32(locator) != ONNXA__SIGNATURE_LOCATOR) locator = NULL;
    saturated = (here == 0xFFFF ? 1u : 0u) + (count == 0xFFFF ? 1u : 0u) +
                (size == 0xFFFFFFFF ? 1u : 0u) + (offset == 0xFFFFFFFF ? 1u : 0u);
    if (!saturated && locator)
        return onnxa__refuse(error, "ZIP64-1", NULL,
                             "a Zip64 locator, which the values of the end record do not need", 0,
                             0);
    if (saturated) {
        const uint8_t *end64;
        if (saturated != 4)
            return onnxa__refuse(error, "ZIP64-1", NULL,
                                 "% of the end record's four values are saturated, expected 0 or 4",
                                 saturated, 0);
        if (!locator || a->size < ONNXA__ALL_ENDS)
            return onnxa__refuse(error, "ZIP64-1", NULL,
                                 "the values of the end record are saturated, without a Zip64 end "
                                 "record and a locator before it",
                                 0, 0);
        a->ends = a->size - ONNXA__ALL_ENDS;
        if (onnxa__u32(locator + 4) || onnxa__u32(locator + 16) != 1)
            return onnxa__refuse(error, "ZIP-3", NULL,
                                 "the Zip64 locator states disk % of %, expected 0 of 1",
                                 onnxa__u32(locator + 4), onnxa__u32(locator + 16));
        if (onnxa__u64(locator + 8) != a->ends)
            return onnxa__refuse(error, "ZIP64-3", NULL,
                                 "the Zip64 locator gives the offset %, expected %",
                                 onnxa__u64(locator + 8), a->ends);
        end64 = a->data + a->ends;
        if (onnxa__u32(end64) != ONNXA__SIGNATURE_END64)
            return onnxa__refuse(error, "ZIP64-3", NULL, "no Zip64 end record at %", a->ends, 0);
        if (onnxa__u64(end64 + 4) != 44 || onnxa__u16(end64 + 14) != 45)
            return onnxa__refuse(error, "ZIP64-2", NULL,
                                 "the Zip64 end record states the size % and version needed %, "
                                 "expected 44 and 45",
                                 onnxa__u64(end64 + 4), onnxa__u16(end64 + 14));
        if (onnxa__u32(end64 + 16) || onnxa__u32(end64 + 20))
            return onnxa__refuse(error, "ZIP-3", NULL,
                                 "the disk numbers of the Zip64 end record are % and %, expected 0",
                                 onnxa__u32(end64 + 16), onnxa__u32(end64 + 20));
        here = onnxa__u64(end64 + 24);
        count = onnxa__u64(end64 + 32);
        size = onnxa__u64(end64 + 40);
        offset = onnxa__u64(end64 + 48);
        if (count < 0xFFFF && size < 0xFFFFFFFF && offset < 0xFFFFFFFF)
            return onnxa__refuse(error, "ZIP64-1", NULL,
                                 "a Zip64 end record, which its values do not need", 0, 0);
    }
    if (here != count)
        return onnxa__refuse(error, "ZIP-4", NULL,
                             "the end record counts % records on this disk and % in all", here,
                             count);
    if (count > ONNXA__MAX_ENTRIES)
        return onnxa__refuse(error, "ZIP-4", NULL, "% entries, expected at most %", count,
                             ONNXA__MAX_ENTRIES);
    if (size < count * ONNXA__RECORD || size > count * ONNXA__MAX_RECORD)
        return onnxa__refuse(error, "ZIP-4", NULL,
                             "a directory of % bytes cannot hold exactly % records", size, count);
    if (size > a->ends || offset != a->ends - size)
        return onnxa__refuse(error, "ZIP-5", NULL,
                             "the directory is stated at %, with % bytes, which does not end where "
                             "the end records begin",
                             offset, size);
    a->directory_offset = offset;
    a->directory_size = (size_t)size;
    a->count = (size_t)count;
    return ONNXA_OK;
}

/* ---- Names: NAME-1, VERSION-1, KEY-1, ASSET-1, MODEL-4 ---- */

/* The length of the UTF-8 sequence at the start of `text` (RFC 3629), 0 if there is none. */
static size_t onnxa__utf8(const char *text, size_t length) {
    const uint8_t *at = (const uint8_t *)text;
    uint8_t low = 0x80, high = 0xBF;
    size_t i, size;
    if (at[0] < 0x80) return 1;
    if (at[0] < 0xC2 || at[0] > 0xF4) return 0;
    size = at[0] < 0xE0 ? 2 : at[0] < 0xF0 ? 3 : 4;
    if (size > length) return 0;
    if (at[0] == 0xE0) low = 0xA0;  /* overlong */
    if (at[0] == 0xED) high = 0x9F; /* surrogates */
    if (at[0] == 0xF0) low = 0x90;  /* overlong */
    if (at[0] == 0xF4) high = 0x8F; /* above U+10FFFF */
    if (at[1] < low || at[1] > high) return 0;
    for (i = 2; i < size; i++)
        if (at[i] < 0x80 || at[i] > 0xBF) return 0;
    return size;
}

static int onnxa__is_lower(char c) { return c >= 'a' && c <= 'z'; }
static int onnxa__is_upper(char c) { return c >= 'A' && c <= 'Z'; }
static int onnxa__is_digit(char c) { return c >= '0' && c <= '9'; }

static int onnxa__begins(const onnxa_entry *entry, const char *with) {
    size_t length = strlen(with);
    return entry->name_length >= length && !memcmp(entry->name, with, length);
}

static int onnxa__is_ascii(const onnxa_entry *entry) {
    size_t i;
    for (i = 0; i < entry->name_length; i++)
        if ((unsigned char)entry->name[i] > 0x7F) return 0;
    return 1;
}

/* True if a name belongs to a model, even with a wrong id. */
static int onnxa__is_model(const onnxa_entry *entry) {
    return onnxa__begins(entry, "__MODEL_PROTO_") ||
           (entry->name_length == sizeof "__MODEL_PROTO" - 1 &&
            onnxa__begins(entry, "__MODEL_PROTO"));
}

static onnxa_status onnxa__check_asset(const onnxa *a, const onnxa_entry *entry,
                                       onnxa_error *error) {
    const char *name = entry->name;
    size_t i, begin = sizeof "assets/" - 1;
    if (entry->name_length > ONNXA_MAX_NAME)
        return onnxa__refuse(error, "ASSET-1", entry, "a name of % bytes, expected at most %",
                             entry->name_length, ONNXA_MAX_NAME);
    for (i = begin; i <= entry->name_length; i++) {
        unsigned char c;
        if (i == entry->name_length || name[i] == '/') {
            size_t length = i - begin;
            if (length < 1 || length > 255)
                return onnxa__refuse(error, "ASSET-1", entry,
                                     "a component of % bytes, expected 1 to %", length, 255);
            if (name[begin] == '.' && (length == 1 || (length == 2 && name[begin + 1] == '.')))
                return onnxa__refuse(error, "ASSET-1", entry, "a component of dots", 0, 0);
            begin = i + 1;
            continue;
        }
        c = (unsigned char)name[i];
        if (c < 0x20 || c == 0x7F || c == '\\' || c == ':' || c == ';')
            return onnxa__refuse(error, "ASSET-1", entry, "byte % of the name is %", i, c);
        if (c == 0xC2 && (unsigned char)name[i + 1] < 0xA0)
            return onnxa__refuse(error, "ASSET-1", entry, "a control character in a name", 0, 0);
    }
    if (onnxa__is_ascii(entry)) return ONNXA_OK;
    if (a->options.is_normalized) {
        if (a->options.is_normalized(a->options.context, name, entry->name_length)) return ONNXA_OK;
        return onnxa__refuse(error, "ASSET-1", entry,
                             "the name is not in Normalization Form C, or has a code point that is "
                             "not assigned",
                             0, 0);
    }
    if (a->options.accept_undecided_names) return ONNXA_OK;
    return onnxa__refuse(error, "ASSET-1", entry,
                         "this program cannot decide whether a name beyond ASCII is in "
                         "Normalization Form C",
                         0, 0);
}

/* Checks the name and sets the kind of an entry. */
static onnxa_status onnxa__check_name(const onnxa *a, onnxa_entry *entry, onnxa_error *error) {
    const char *name = entry->name;
    size_t i, size, length = entry->name_length;
    for (i = 0; i < length; i += size) {
        size = onnxa__utf8(name + i, length - i);
        if (!size)
            return onnxa__refuse(error, "NAME-1", entry, "the name is not UTF-8 at byte %", i, 0);
    }
    if (onnxa__begins(entry, "assets/")) {
        entry->kind = ONNXA_ASSET;
        return onnxa__check_asset(a, entry, error);
    }
    if (onnxa__is_model(entry)) {
        const size_t prefix = sizeof "__MODEL_PROTO_" - 1;
        entry->kind = ONNXA_MODEL;
        if (length < prefix) return ONNXA_OK;
        if (length == prefix || length - prefix > 64 || !onnxa__is_lower(name[prefix]))
            return onnxa__refuse(error, "MODEL-4", entry,
                                 "an id of % bytes, expected 1 to 64, the first one from a to z",
                                 length - prefix, 0);
        for (i = prefix; i < length; i++)
            if (!onnxa__is_lower(name[i]) && !onnxa__is_digit(name[i]) && name[i] != '_')
                return onnxa__refuse(error, "MODEL-4", entry,
                                     "byte % of the id is none of a to z, 0 to 9 and _", i - prefix,
                                     0);
        return ONNXA_OK;
    }
    entry->kind = ONNXA_TENSOR_DATA;
    if (length < 1 || length > 255)
        return onnxa__refuse(error, "KEY-1", entry, "a key of % bytes, expected 1 to %", length,
                             255);
    for (i = 0; i < length; i++)
        if (!onnxa__is_lower(name[i]) && !onnxa__is_upper(name[i]) && name[i] != '_' &&
            (!onnxa__is_digit(name[i]) || !i))
            return onnxa__refuse(error, "KEY-1", entry,
                                 "byte % of a key is not one that a C identifier has there", i, 0);
    if (!onnxa__compare_names(name, length, "assets", 6))
        return onnxa__refuse(error, "KEY-1", entry, "this key is the name of a folder", 0, 0);
    return ONNXA_OK;
}

/* ---- The directory: ZIP-3, ZIP-4, ZIP-8 to ZIP-13, ZIP64-4 ---- */

/* Takes the size and the header offset from a record and its Zip64 field. */
static onnxa_status onnxa__read_zip64(onnxa_entry *entry, onnxa_error *error) {
    const uint8_t *record = entry->record;
    const uint8_t *field = record + ONNXA__RECORD + entry->name_length;
    int big = onnxa__u32(record + 24) == 0xFFFFFFFF, far = onnxa__u32(record + 42) == 0xFFFFFFFF;
    size_t extra = onnxa__u16(record + 30), expected = (big ? 16u : 0u) + (far ? 8u : 0u);
    entry->size = onnxa__u32(record + 24);
    entry->header_offset = onnxa__u32(record + 42);
    if (onnxa__u32(record + 20) != onnxa__u32(record + 24))
        return onnxa__refuse(error, "ZIP-8", entry, "compressed size %, uncompressed size %",
                             onnxa__u32(record + 20), onnxa__u32(record + 24));
    if (!expected) {
        if (!extra) return ONNXA_OK;
        return onnxa__refuse(error, "ZIP-13", entry,
                             "% bytes of extra fields in the directory, expected none", extra, 0);
    }
    if (extra < 4 || onnxa__u16(field) != 1 || onnxa__u16(field + 2) != extra - 4)
        return onnxa__refuse(error, "ZIP-13", entry,
                             "% bytes of extra fields in the directory, expected one Zip64 field",
                             extra, 0);
    if (extra - 4 != expected)
        return onnxa__refuse(error, "ZIP64-4", entry,
                             "the Zip64 field of the directory has % bytes, expected %", extra - 4,
                             expected);
    if (onnxa__u16(record + 6) != 45)
        return onnxa__refuse(error, "ZIP-10", entry,
                             "version needed % with a Zip64 field, expected 45",
                             onnxa__u16(record + 6), 0);
    if (big) {
        entry->size = onnxa__u64(field + 4);
        if (onnxa__u64(field + 12) != entry->size)
            return onnxa__refuse(error, "ZIP-8", entry,
                                 "compressed size %, uncompressed size % in the Zip64 field",
                                 onnxa__u64(field + 12), entry->size);
    }
    if (far) entry->header_offset = onnxa__u64(field + (big ? 20 : 4));
    if ((big && entry->size < 0xFFFFFFFF) || (far && entry->header_offset < 0xFFFFFFFF))
        return onnxa__refuse(error, "ZIP64-4", entry,
                             "size % and header offset %: the Zip64 field holds one that fits",
                             entry->size, entry->header_offset);
    return ONNXA_OK;
}

static onnxa_status onnxa__read_record(const onnxa *a, onnxa_entry *entry, onnxa_error *error) {
    const uint8_t *record = entry->record;
    uint32_t made_by = onnxa__u16(record + 4), version = onnxa__u16(record + 6);
    uint32_t flags = onnxa__u16(record + 8), method = onnxa__u16(record + 10);
    uint32_t comment = onnxa__u16(record + 32);
    uint32_t attributes = onnxa__u32(record + 38), kind = attributes >> 28;
    onnxa_status status;
    entry->crc32 = onnxa__u32(record + 16);
    if (onnxa__u16(record + 34))
        return onnxa__refuse(error, "ZIP-3", entry, "disk number %, expected 0",
                             onnxa__u16(record + 34), 0);
    status = onnxa__check_name(a, entry, error);
    if (status) return status;
    if (flags != (onnxa__is_ascii(entry) ? 0u : 0x0800u))
        return onnxa__refuse(error, "ZIP-9", entry, "flags %, expected %", flags,
                             onnxa__is_ascii(entry) ? 0 : 0x0800);
    if (method)
        return onnxa__refuse(error, "ZIP-8", entry, "compression method %, expected 0 (stored)",
                             method, 0);
    if (version != 10 && version != 20 && version != 45)
        return onnxa__refuse(error, "ZIP-10", entry, "version needed %, expected 10, 20 or 45",
                             version, 0);
    if (made_by >> 8 != 3)
        return onnxa__refuse(error, "ZIP-11", entry, "made by system %, expected 3 (Unix)",
                             made_by >> 8, 0);
    if ((kind != 0 && kind != 8) || (attributes >> 16 & 0x0E00) || (attributes & 0xFFD8) ||
        onnxa__u16(record + 36))
        return onnxa__refuse(error, "ZIP-11", entry,
                             "external attributes % and internal attributes % are not those of a "
                             "plain file",
                             attributes, onnxa__u16(record + 36));
    if (comment)
        return onnxa__refuse(error, "ZIP-12", entry, "a comment of % bytes, expected none", comment,
                             0);
    return onnxa__read_zip64(entry, error);
}

static onnxa_status onnxa__read_directory(onnxa *a, onnxa_error *error) {
    size_t i, at = 0;
    if (!a->count)
        return onnxa__refuse(error, "MODEL-1", NULL, "no entries, expected a model", 0, 0);
    a->directory = (uint8_t *)onnxa__allocate(a, a->directory_size + 1, 1);
    if (!a->directory) return onnxa__no_memory(a, error, (uint64_t)a->directory_size + 1);
    a->entries = (onnxa_entry *)onnxa__allocate(a, a->count, sizeof *a->entries);
    if (!a->entries) return onnxa__no_memory(a, error, (uint64_t)a->count * sizeof *a->entries);
    memcpy(a->directory, a->data + a->directory_offset, a->directory_size);
    memset(a->entries, 0, a->count * sizeof *a->entries);
    for (i = 0; i < a->count; i++) {
        const uint8_t *record = a->directory + at;
        onnxa_entry *entry = &a->entries[i];
        size_t left = a->directory_size - at, size;
        if (left < ONNXA__RECORD || onnxa__u32(record) != ONNXA__SIGNATURE_RECORD)
            return onnxa__refuse(error, "ZIP-4", NULL, "no directory record at %, number %",
                                 a->directory_offset + at, i);
        size = ONNXA__RECORD + onnxa__u16(record + 28) + onnxa__u16(record + 30) +
               onnxa__u16(record + 32);
        if (left < size)
            return onnxa__refuse(error, "ZIP-4", NULL,
                                 "the directory record at % does not end within the directory",
                                 a->directory_offset + at, 0);
        entry->record = record;
        entry->name = (const char *)record + ONNXA__RECORD;
        entry->name_length = onnxa__u16(record + 28);
        at += size;
    }
    if (at != a->directory_size)
        return onnxa__refuse(error, "ZIP-4", NULL, "% bytes of the directory follow its % records",
                             a->directory_size - at, a->count);
    /* First: is this reader too old for the file? */
    for (i = 0; i < a->count; i++)
        if (onnxa__begins(&a->entries[i], "__") && !onnxa__is_model(&a->entries[i]))
            return onnxa__refuse(error, "VERSION-1", &a->entries[i],
                                 "the file was written for a later version of the format", 0, 0);
    for (i = 0; i < a->count; i++) {
        onnxa_status status = onnxa__read_record(a, &a->entries[i], error);
        if (status) return status;
    }
    /* Writes a NUL into the byte after each name: the first byte of the extra fields or of the next
     * record, or the spare byte after the last record. The fields that are compared with the local
     * header, bytes 6 to 29 of each record, stay unchanged. */
    for (i = 0; i < a->count; i++)
        a->directory[(size_t)(a->entries[i].record - a->directory) + ONNXA__RECORD +
                     a->entries[i].name_length] = 0;
    return ONNXA_OK;
}

/* ---- All entries together: NAME-2, MODEL-1, MODEL-2, MODEL-4, ZIP-1, ZIP-6, ALIGN-1 ---- */

static uint64_t onnxa__header_size(const onnxa_entry *entry) {
    return ONNXA__LOCAL + entry->name_length + ONNXA__ALIGNMENT +
           (entry->size < 0xFFFFFFFF ? 0 : ONNXA__ZIP64_SIZES);
}

static onnxa_status onnxa__check_names(onnxa *a, onnxa_error *error) {
    uint32_t *spare;
    size_t i;
    a->by_name = (uint32_t *)onnxa__allocate(a, a->count, sizeof *a->by_name);
    spare = (uint32_t *)onnxa__allocate(a, a->count, sizeof *spare);
    if (!a->by_name || !spare) {
        onnxa__release(a, spare, a->count, sizeof *spare);
        return onnxa__no_memory(a, error, (uint64_t)a->count * sizeof *spare);
    }
    for (i = 0; i < a->count; i++) a->by_name[i] = (uint32_t)i;
    onnxa__sort(a, a->by_name, spare, a->count, onnxa__compare_entries);
    onnxa__release(a, spare, a->count, sizeof *spare);
    for (i = 1; i < a->count; i++) {
        const onnxa_entry *left = &a->entries[a->by_name[i - 1]];
        const onnxa_entry *right = &a->entries[a->by_name[i]];
        size_t length = left->name_length;
        if (right->name_length < length ||
            onnxa__compare_names(left->name, length, right->name, length))
            continue;
        if (right->name_length == length)
            return onnxa__refuse(error, "NAME-2", right, "two entries have this name down-cased", 0,
                                 0);
        if (right->name[length] == '/')
            return onnxa__refuse(error, "NAME-2", right,
                                 "down-cased, the first % bytes of this name are the name of "
                                 "another entry",
                                 length, 0);
    }
    return ONNXA_OK;
}

static onnxa_status onnxa__check_models(onnxa *a, onnxa_error *error) {
    const onnxa_entry *last = &a->entries[a->count - 1], *entry;
    uint64_t bytes = 0;
    size_t i, first = a->count - 1;
    if (last->kind != ONNXA_MODEL || last->name_length != sizeof "__MODEL_PROTO" - 1)
        return onnxa__refuse(error, "MODEL-1", last, "the last entry is not __MODEL_PROTO", 0, 0);
    while (first && a->entries[first - 1].kind == ONNXA_MODEL) first--;
    for (i = 0; i + 1 < a->count; i++) {
        entry = &a->entries[i];
        if (entry->kind == ONNXA_MODEL &&
            (i < first || (i > first && strcmp(entry[-1].name, entry->name) >= 0)))
            return onnxa__refuse(error, "MODEL-4", entry,
                                 "further models lie directly before the default one, in ascending "
                                 "order of their names",
                                 0, 0);
    }
    for (i = first; i < a->count; i++) {
        entry = &a->entries[i];
        if (entry->size >= 0x80000000u)
            return onnxa__refuse(error, "MODEL-2", entry, "a model of % bytes, expected less than %",
                                 entry->size, 0x80000000u);
        bytes += entry->size;
    }
    if (a->options.max_model_bytes && bytes > a->options.max_model_bytes)
        return onnxa__fail(error, ONNXA_LIMIT, NULL, NULL,
                           "the models have % bytes, the limit of the caller is %", bytes,
                           a->options.max_model_bytes);
    a->model_count = a->count - first;
    a->models = (onnxa_model *)onnxa__allocate(a, a->model_count, sizeof *a->models);
    if (!a->models) return onnxa__no_memory(a, error, (uint64_t)a->model_count * sizeof *a->models);
    memset(a->models, 0, a->model_count * sizeof *a->models);
    a->models[0].id = "";
    a->models[0].entry = last;
    for (i = 1; i < a->model_count; i++) {
        a->models[i].entry = &a->entries[first + i - 1];
        a->models[i].id = a->models[i].entry->name + sizeof "__MODEL_PROTO_" - 1;
    }
    return ONNXA_OK;
}

static onnxa_status onnxa__check_places(onnxa *a, onnxa_error *error) {
    size_t i;
    if (a->entries[0].header_offset)
        return onnxa__refuse(error, "ZIP-1", &a->entries[0],
                             "the first header offset is %, expected 0",
                             a->entries[0].header_offset, 0);
    for (i = 0; i < a->count; i++) {
        onnxa_entry *entry = &a->entries[i];
        uint64_t begin = entry->header_offset, least = onnxa__header_size(entry);
        uint64_t next = i + 1 < a->count ? entry[1].header_offset : a->directory_offset;
        if (next < begin || next > a->directory_offset || next - begin < entry->size ||
            next - begin - entry->size < least ||
            next - begin - entry->size > least + ONNXA__MAX_PADDING)
            return onnxa__refuse(error, "ZIP-6", entry,
                                 "the space from % to % does not fit the local header and the data",
                                 begin, next);
        entry->data_offset = next - entry->size;
        if (entry->data_offset % 64)
            return onnxa__refuse(error, "ALIGN-1", entry,
                                 "the data begins at %, expected a multiple of 64",
                                 entry->data_offset, 0);
    }
    return ONNXA_OK;
}

/* ---- False records of the end: ZIP-16 ---- */

static int onnxa__is_end_signature(uint32_t value) {
    return value == ONNXA__SIGNATURE_END || value == ONNXA__SIGNATURE_END64 ||
           value == ONNXA__SIGNATURE_LOCATOR;
}

static int onnxa__holds_signature(uint64_t offset) {
    unsigned shift, shifts = offset < 0xFFFFFFFF ? 0 : 32;
    for (shift = 0; shift <= shifts; shift += 8)
        if (onnxa__is_end_signature((uint32_t)(offset >> shift & 0xFFFFFFFFu))) return 1;
    return 0;
}

static int onnxa__reads_as_end(const uint8_t *at, size_t left) {
    uint32_t signature = onnxa__u32(at);
    if (signature == ONNXA__SIGNATURE_END)
        return left >= 22 && !onnxa__u32(at + 4) && onnxa__u16(at + 8) == onnxa__u16(at + 10);
    if (signature == ONNXA__SIGNATURE_LOCATOR)
        return (left >= 24 && onnxa__u32(at + 20) == ONNXA__SIGNATURE_END) ||
               (left >= 20 && !onnxa__u32(at + 4) && onnxa__u32(at + 16) == 1);
    return signature == ONNXA__SIGNATURE_END64 && left >= 12 && onnxa__u64(at + 4) == 44;
}

static onnxa_status onnxa__check_tail(const onnxa *a, onnxa_error *error) {
    uint64_t at = a->size > ONNXA__TAIL ? a->size - ONNXA__TAIL : 0;
    uint64_t offset = a->entries[a->count - 1].header_offset;
    for (; at < a->ends; at++)
        if (a->data[at] == 0x50 && a->data[at + 1] == 0x4B &&
            onnxa__reads_as_end(a->data + at, (size_t)(a->size - at)))
            return onnxa__refuse(error, "ZIP-16", NULL,
                                 "the bytes at % are a false record", at, 0);
    if (onnxa__holds_signature(offset) || onnxa__holds_signature(a->directory_offset))
        return onnxa__refuse(error, "ZIP-16", NULL,
                             "the last header offset, %, or that of the directory, %, holds a "
                             "signature",
                             offset, a->directory_offset);
    return ONNXA_OK;
}

/* ---- A local header: ZIP-7, ZIP-14, ZIP64-5, ALIGN-2, ALIGN-3 ---- */

static onnxa_status onnxa__check_header(const onnxa *a, const onnxa_entry *entry,
                                        onnxa_error *error) {
    const uint8_t *header = a->data + entry->header_offset, *extra;
    size_t size = (size_t)(entry->data_offset - entry->header_offset), left, i;
    uint32_t alignment;
    if (onnxa__u32(header) != ONNXA__SIGNATURE_LOCAL)
        return onnxa__refuse(error, "ZIP-7", entry, "no local header at %", entry->header_offset, 0);
    if (memcmp(header + 4, entry->record + 6, 24))
        return onnxa__refuse(error, "ZIP-7", entry,
                             "the local header states something else than the directory", 0, 0);
    if (memcmp(header + ONNXA__LOCAL, entry->name, entry->name_length))
        return onnxa__refuse(error, "ZIP-7", entry, "the local header has another name", 0, 0);
    left = onnxa__u16(header + 28);
    if (ONNXA__LOCAL + entry->name_length + left != size)
        return onnxa__refuse(error, "ZIP-7", entry,
                             "the local header ends at %, the data begins at %",
                             entry->header_offset + ONNXA__LOCAL + entry->name_length + left,
                             entry->data_offset);
    extra = header + ONNXA__LOCAL + entry->name_length;
    if (entry->size >= 0xFFFFFFFF) {
        size_t field;
        if (onnxa__u16(extra) != 1 || onnxa__u16(extra + 2) > left - 4)
            return onnxa__refuse(error, "ZIP-14", entry,
                                 "the extra fields of the local header do not begin with a "
                                 "complete Zip64 field",
                                 0, 0);
        field = onnxa__u16(extra + 2);
        if (field != 16 || onnxa__u64(extra + 4) != entry->size ||
            onnxa__u64(extra + 12) != entry->size)
            return onnxa__refuse(error, "ZIP64-5", entry,
                                 "the Zip64 field of the local header has % bytes, expected the "
                                 "size % twice",
                                 field, entry->size);
        extra += ONNXA__ZIP64_SIZES;
        left -= ONNXA__ZIP64_SIZES;
    }
    /* ZIP-6 has left room for the 6 bytes of the alignment field. */
    if (onnxa__u16(extra) != 0xD935 || onnxa__u16(extra + 2) != left - 4)
        return onnxa__refuse(error, "ZIP-14", entry,
                             "field % of % bytes, expected only the alignment field",
                             onnxa__u16(extra), onnxa__u16(extra + 2));
    alignment = onnxa__u16(extra + 4);
    if (alignment < 64 || (alignment & (alignment - 1)) || entry->data_offset % alignment)
        return onnxa__refuse(error, "ALIGN-2", entry, "data at % with the alignment %",
                             entry->data_offset, alignment);
    left -= ONNXA__ALIGNMENT;
    if (left >= alignment)
        return onnxa__refuse(error, "ALIGN-3", entry,
                             "% bytes of padding, more than the alignment % needs", left, alignment);
    for (i = 0; i < left; i++)
        if (extra[ONNXA__ALIGNMENT + i])
            return onnxa__refuse(error, "ALIGN-3", entry, "byte % of the padding is %, expected 0",
                                 i, extra[ONNXA__ALIGNMENT + i]);
    return ONNXA_OK;
}

/* ---- The encoding of Protocol Buffers: MODEL-3 ---- */

typedef struct onnxa__slice {
    const uint8_t *at, *end;
} onnxa__slice;

typedef struct onnxa__field {
    uint64_t number;
    unsigned wire;        /* 0 varint, 1 eight bytes, 2 a length and content, 5 four bytes */
    uint64_t value;       /* of a varint */
    onnxa__slice content; /* the bytes of the value, without tag and length */
    onnxa__slice whole;   /* from the tag on */
} onnxa__field;

/* Reads a varint of at most `limit` bytes. Bits above the 64th are dropped. */
static int onnxa__varint(onnxa__slice *in, unsigned limit, uint64_t *value) {
    uint64_t result = 0;
    unsigned i;
    for (i = 0; i < limit; i++) {
        uint8_t byte;
        if (in->at == in->end) return 0;
        byte = *in->at++;
        result |= (uint64_t)(byte & 0x7F) << 7 * i; /* 7 * i is at most 63 */
        if (byte < 0x80) {
            *value = result;
            return 1;
        }
    }
    return 0;
}

/* Reads the value after a tag of wire type 0, 1, 2 or 5. */
static int onnxa__step(onnxa__slice *in, unsigned wire, onnxa__field *field) {
    uint64_t length = wire == 1 ? 8 : 4;
    if (wire == 0) {
        field->content.at = in->at;
        if (!onnxa__varint(in, 10, &field->value)) return 0;
        field->content.end = in->at;
        return 1;
    }
    if (wire == 2 && !onnxa__varint(in, 5, &length)) return 0;
    if (length > (uint64_t)(in->end - in->at)) return 0;
    field->content.at = in->at;
    in->at += (size_t)length;
    field->content.end = in->at;
    return 1;
}

/* Kinds of messages; a PLAIN message holds neither messages nor repeated numbers. */
enum {
    ONNXA__PLAIN,
    ONNXA__MODEL_PROTO,
    ONNXA__GRAPH,
    ONNXA__TRAINING_INFO,
    ONNXA__FUNCTION,
    ONNXA__NODE,
    ONNXA__TENSOR,
    ONNXA__VALUE_INFO,
    ONNXA__TENSOR_ANNOTATION,
    ONNXA__SPARSE_TENSOR,
    ONNXA__ATTRIBUTE,
    ONNXA__NODE_DEVICES,
    ONNXA__TYPE,
    ONNXA__SHARDING_SPEC,
    ONNXA__TYPE_TENSOR,
    ONNXA__TYPE_SEQUENCE,
    ONNXA__TYPE_MAP,
    ONNXA__TYPE_SPARSE,
    ONNXA__TYPE_OPTIONAL,
    ONNXA__INT_LIST,
    ONNXA__SHARDED_DIM,
    ONNXA__SHAPE,
    /* Other contents of a field of wire type 2. */
    ONNXA__VARINTS,
    ONNXA__FIXED32,
    ONNXA__FIXED64,
    ONNXA__BYTES /* a string, bytes, or an unknown field: not looked at */
};

/* What a field of wire type 2 holds, from ../../../spec/messages.csv. */
static int onnxa__content(int message, uint64_t number) {
    if (number > 31) return ONNXA__BYTES;
#define ONNXA__FIELD(message, number) case ONNXA__##message * 32 + number
    switch (message * 32 + (int)number) {
        ONNXA__FIELD(MODEL_PROTO, 7): return ONNXA__GRAPH;
        ONNXA__FIELD(MODEL_PROTO, 8): return ONNXA__PLAIN; /* opset_import */
        ONNXA__FIELD(MODEL_PROTO, 14): return ONNXA__PLAIN; /* metadata_props */
        ONNXA__FIELD(MODEL_PROTO, 20): return ONNXA__TRAINING_INFO;
        ONNXA__FIELD(MODEL_PROTO, 25): return ONNXA__FUNCTION;
        ONNXA__FIELD(MODEL_PROTO, 26): return ONNXA__PLAIN; /* configuration */
        ONNXA__FIELD(GRAPH, 1): return ONNXA__NODE;
        ONNXA__FIELD(GRAPH, 5): return ONNXA__TENSOR; /* initializer */
        ONNXA__FIELD(GRAPH, 11): return ONNXA__VALUE_INFO; /* input */
        ONNXA__FIELD(GRAPH, 12): return ONNXA__VALUE_INFO; /* output */
        ONNXA__FIELD(GRAPH, 13): return ONNXA__VALUE_INFO;
        ONNXA__FIELD(GRAPH, 14): return ONNXA__TENSOR_ANNOTATION;
        ONNXA__FIELD(GRAPH, 15): return ONNXA__SPARSE_TENSOR; /* sparse_initializer */
        ONNXA__FIELD(GRAPH, 16): return ONNXA__PLAIN; /* metadata_props */
        ONNXA__FIELD(TRAINING_INFO, 1): return ONNXA__GRAPH; /* initialization */
        ONNXA__FIELD(TRAINING_INFO, 2): return ONNXA__GRAPH; /* algorithm */
        ONNXA__FIELD(TRAINING_INFO, 3): return ONNXA__PLAIN; /* initialization_binding */
        ONNXA__FIELD(TRAINING_INFO, 4): return ONNXA__PLAIN; /* update_binding */
        ONNXA__FIELD(FUNCTION, 7): return ONNXA__NODE;
        ONNXA__FIELD(FUNCTION, 9): return ONNXA__PLAIN; /* opset_import */
        ONNXA__FIELD(FUNCTION, 11): return ONNXA__ATTRIBUTE; /* attribute_proto */
        ONNXA__FIELD(FUNCTION, 12): return ONNXA__VALUE_INFO;
        ONNXA__FIELD(FUNCTION, 14): return ONNXA__PLAIN; /* metadata_props */
        ONNXA__FIELD(NODE, 5): return ONNXA__ATTRIBUTE;
        ONNXA__FIELD(NODE, 9): return ONNXA__PLAIN; /* metadata_props */
        ONNXA__FIELD(NODE, 10): return ONNXA__NODE_DEVICES; /* device_configurations */
        ONNXA__FIELD(TENSOR, 1): return ONNXA__VARINTS; /* dims */
        ONNXA__FIELD(TENSOR, 3): return ONNXA__PLAIN; /* segment */
        ONNXA__FIELD(TENSOR, 4): return ONNXA__FIXED32; /* float_data */
        ONNXA__FIELD(TENSOR, 5): return ONNXA__VARINTS; /* int32_data */
        ONNXA__FIELD(TENSOR, 7): return ONNXA__VARINTS; /* int64_data */
        ONNXA__FIELD(TENSOR, 10): return ONNXA__FIXED64; /* double_data */
        ONNXA__FIELD(TENSOR, 11): return ONNXA__VARINTS; /* uint64_data */
        ONNXA__FIELD(TENSOR, 13): return ONNXA__PLAIN; /* external_data */
        ONNXA__FIELD(TENSOR, 16): return ONNXA__PLAIN; /* metadata_props */
        ONNXA__FIELD(VALUE_INFO, 2): return ONNXA__TYPE;
        ONNXA__FIELD(VALUE_INFO, 4): return ONNXA__PLAIN; /* metadata_props */
        ONNXA__FIELD(TENSOR_ANNOTATION, 2): return ONNXA__PLAIN;
        ONNXA__FIELD(SPARSE_TENSOR, 1): return ONNXA__TENSOR; /* values */
        ONNXA__FIELD(SPARSE_TENSOR, 2): return ONNXA__TENSOR; /* indices */
        ONNXA__FIELD(SPARSE_TENSOR, 3): return ONNXA__VARINTS; /* dims */
        ONNXA__FIELD(ATTRIBUTE, 5): return ONNXA__TENSOR; /* t */
        ONNXA__FIELD(ATTRIBUTE, 6): return ONNXA__GRAPH; /* g */
        ONNXA__FIELD(ATTRIBUTE, 7): return ONNXA__FIXED32; /* floats */
        ONNXA__FIELD(ATTRIBUTE, 8): return ONNXA__VARINTS; /* ints */
        ONNXA__FIELD(ATTRIBUTE, 10): return ONNXA__TENSOR; /* tensors */
        ONNXA__FIELD(ATTRIBUTE, 11): return ONNXA__GRAPH; /* graphs */
        ONNXA__FIELD(ATTRIBUTE, 14): return ONNXA__TYPE; /* tp */
        ONNXA__FIELD(ATTRIBUTE, 15): return ONNXA__TYPE; /* type_protos */
        ONNXA__FIELD(ATTRIBUTE, 22): return ONNXA__SPARSE_TENSOR;
        ONNXA__FIELD(ATTRIBUTE, 23): return ONNXA__SPARSE_TENSOR; /* sparse_tensors */
        ONNXA__FIELD(NODE_DEVICES, 2): return ONNXA__SHARDING_SPEC;
        ONNXA__FIELD(TYPE, 1): return ONNXA__TYPE_TENSOR;
        ONNXA__FIELD(TYPE, 4): return ONNXA__TYPE_SEQUENCE;
        ONNXA__FIELD(TYPE, 5): return ONNXA__TYPE_MAP;
        ONNXA__FIELD(TYPE, 7): return ONNXA__PLAIN; /* opaque_type */
        ONNXA__FIELD(TYPE, 8): return ONNXA__TYPE_SPARSE;
        ONNXA__FIELD(TYPE, 9): return ONNXA__TYPE_OPTIONAL;
        ONNXA__FIELD(SHARDING_SPEC, 2): return ONNXA__VARINTS; /* device */
        ONNXA__FIELD(SHARDING_SPEC, 3): return ONNXA__INT_LIST; /* index_to_device_group_map */
        ONNXA__FIELD(SHARDING_SPEC, 4): return ONNXA__SHARDED_DIM;
        ONNXA__FIELD(TYPE_TENSOR, 2): return ONNXA__SHAPE;
        ONNXA__FIELD(TYPE_SEQUENCE, 1): return ONNXA__TYPE;
        ONNXA__FIELD(TYPE_MAP, 2): return ONNXA__TYPE; /* value_type */
        ONNXA__FIELD(TYPE_SPARSE, 2): return ONNXA__SHAPE;
        ONNXA__FIELD(TYPE_OPTIONAL, 1): return ONNXA__TYPE;
        ONNXA__FIELD(INT_LIST, 2): return ONNXA__VARINTS;
        ONNXA__FIELD(SHARDED_DIM, 2): return ONNXA__PLAIN; /* simple_sharding */
        ONNXA__FIELD(SHAPE, 1): return ONNXA__PLAIN; /* dim */
        default: return ONNXA__BYTES;
    }
#undef ONNXA__FIELD
}

static int onnxa__holds_complete_numbers(onnxa__slice packed, int content) {
    size_t length = (size_t)(packed.end - packed.at);
    uint64_t ignored;
    if (content == ONNXA__FIXED32) return length % 4 == 0;
    if (content == ONNXA__FIXED64) return length % 8 == 0;
    while (packed.at < packed.end)
        if (!onnxa__varint(&packed, 10, &ignored)) return 0;
    return 1;
}

/* Checks the encoding of a whole model, and counts its messages in a->messages. */
static onnxa_status onnxa__check_encoding(onnxa *a, const onnxa_model *model, onnxa_error *error) {
    struct {
        const uint8_t *end;
        uint64_t group; /* the number of its field */
        int message;    /* -1 for a group */
    } open[ONNXA__MAX_DEPTH + 1]; /* messages and groups around the next tag; 0 is the ModelProto */
    int depth = 0, versions = 0, graphs = 0;
    const onnxa_entry *entry = model->entry;
    const uint8_t *begin = model->data;
    onnxa__slice in;
    in.at = begin;
    open[0].end = begin + (size_t)entry->size;
    open[0].group = 0;
    open[0].message = ONNXA__MODEL_PROTO;
    for (;;) {
        onnxa__field field;
        const uint8_t *tag_at = in.at;
        uint64_t tag;
        int in_group = open[depth].message < 0, content = ONNXA__BYTES;
        in.end = open[depth].end;
        if (in.at == in.end && !in_group) {
            if (!depth) break;
            depth--;
            continue;
        }
        if (!onnxa__varint(&in, 5, &tag))
            return onnxa__refuse(error, "MODEL-3", entry,
                                 "the tag at byte % of the model is incomplete or too long",
                                 (uint64_t)(tag_at - begin), 0);
        field.number = tag >> 3;
        field.wire = (unsigned)(tag & 7);
        if (field.wire > 5 || field.number > 0x1FFFFFFF || (!field.number && !in_group))
            return onnxa__refuse(error, "MODEL-3", entry,
                                 "the tag % at byte % of the model has an invalid field number or "
                                 "wire type",
                                 tag, (uint64_t)(tag_at - begin));
        if (field.wire == 4) {
            if (!in_group || open[depth].group != field.number)
                return onnxa__refuse(error, "MODEL-3", entry,
                                     "an unmatched end of a group at byte % of the model",
                                     (uint64_t)(tag_at - begin), 0);
            depth--;
            continue;
        }
        if (field.wire != 3) {
            if (!onnxa__step(&in, field.wire, &field))
                return onnxa__refuse(error, "MODEL-3", entry,
                                     "the field at byte % of the model exceeds the message around "
                                     "it, or has a varint of too many bytes",
                                     (uint64_t)(tag_at - begin), 0);
            if (field.wire == 0 && !depth && field.number == 1) versions = 1;
            if (field.wire != 2 || in_group) continue;
            content = onnxa__content(open[depth].message, field.number);
            if (content == ONNXA__BYTES) continue;
            if (content == ONNXA__VARINTS || content == ONNXA__FIXED32 ||
                content == ONNXA__FIXED64) {
                if (onnxa__holds_complete_numbers(field.content, content)) continue;
                return onnxa__refuse(error, "MODEL-3", entry,
                                     "the packed field at byte % of the model has a number that is "
                                     "incomplete or too long",
                                     (uint64_t)(tag_at - begin), 0);
            }
            if (++a->messages > ONNXA__MAX_MESSAGES)
                return onnxa__refuse(error, "MODEL-3", entry,
                                     "the models have more than % messages", ONNXA__MAX_MESSAGES, 0);
            if (!depth && field.number == 7 && ++graphs > 1)
                return onnxa__refuse(error, "MODEL-3", entry,
                                     "a second graph at byte % of the model, expected one",
                                     (uint64_t)(tag_at - begin), 0);
        }
        if (depth == ONNXA__MAX_DEPTH)
            return onnxa__refuse(error, "MODEL-3", entry,
                                 "messages are nested more than % deep at byte % of the model",
                                 ONNXA__MAX_DEPTH, (uint64_t)(tag_at - begin));
        depth++;
        if (field.wire == 3) {
            open[depth].message = -1;
            open[depth].group = field.number;
            open[depth].end = in.end;
        } else {
            open[depth].message = content;
            open[depth].group = 0;
            open[depth].end = field.content.end;
            in.at = field.content.at;
        }
    }
    if (!versions || !graphs)
        return onnxa__refuse(error, "MODEL-3", entry,
                             "% fields ir_version and % graphs, expected both",
                             (uint64_t)versions, (uint64_t)graphs);
    return ONNXA_OK;
}

/* Reads the next field and steps over groups; 0 at the end. The encoding has been checked. */
static int onnxa__next(onnxa__slice *in, onnxa__field *field) {
    unsigned groups = 0;
    for (;;) {
        uint64_t tag;
        field->whole.at = in->at;
        if (in->at == in->end || !onnxa__varint(in, 5, &tag)) return 0;
        field->number = tag >> 3;
        field->wire = (unsigned)(tag & 7);
        if (field->wire == 3) {
            groups++;
        } else if (field->wire == 4) {
            if (!groups--) return 0;
        } else {
            if (!onnxa__step(in, field->wire, field)) return 0;
            field->whole.end = in->at;
            if (!groups) return 1;
        }
    }
}

/* Reads the next field with this number and wire type 2; 0 if there is none. */
static int onnxa__next_of(onnxa__slice *in, uint64_t number, onnxa__field *field) {
    while (onnxa__next(in, field))
        if (field->number == number && field->wire == 2) return 1;
    return 0;
}

/* ---- Data types ---- */

static const struct {
    const char *name;
    unsigned bits;
} onnxa__types[] = {
    {NULL, 0},           {"FLOAT", 32},        {"UINT8", 8},           {"INT8", 8},
    {"UINT16", 16},      {"INT16", 16},        {"INT32", 32},          {"INT64", 64},
    {NULL, 0},           {"BOOL", 8},          {"FLOAT16", 16},        {"DOUBLE", 64},
    {"UINT32", 32},      {"UINT64", 64},       {"COMPLEX64", 64},      {"COMPLEX128", 128},
    {"BFLOAT16", 16},    {"FLOAT8E4M3FN", 8},  {"FLOAT8E4M3FNUZ", 8},  {"FLOAT8E5M2", 8},
    {"FLOAT8E5M2FNUZ", 8}, {"UINT4", 4},       {"INT4", 4},            {"FLOAT4E2M1", 4},
    {"FLOAT8E8M0", 8},   {"UINT2", 2},         {"INT2", 2},            {"FLOAT6E2M3", 6},
    {"FLOAT6E3M2", 6}};
#define ONNXA__TYPES (sizeof onnxa__types / sizeof *onnxa__types)
#define ONNXA__BOOL 9

ONNXA_DEF const char *onnxa_type_name(int data_type) {
    return data_type < 0 || (size_t)data_type >= ONNXA__TYPES ? NULL : onnxa__types[data_type].name;
}

ONNXA_DEF unsigned onnxa_type_bits(int data_type) {
    return data_type < 0 || (size_t)data_type >= ONNXA__TYPES ? 0 : onnxa__types[data_type].bits;
}

static uint64_t onnxa__elements(const int64_t *dims, size_t rank) {
    uint64_t count = 1;
    size_t i;
    for (i = 0; i < rank; i++)
        if (!dims[i]) return 0;
    for (i = 0; i < rank; i++) count *= (uint64_t)dims[i];
    return count;
}

/* ---- Tensors of a model: DATA-1 to DATA-5, DATA-7, DATA-8, TENSOR-1 to TENSOR-3 ---- */

typedef struct onnxa__text {
    const char *at;
    size_t length;
} onnxa__text;

typedef struct onnxa__pairs { /* of one key of external_data */
    size_t count;
    onnxa__text value; /* of the last */
} onnxa__pairs;

/* A TensorProto. If the field that holds it is not repeated, all occurrences are merged. */
typedef struct onnxa__tensor {
    int is_there, is_external, has_segment, has_raw_data, has_elements;
    uint32_t data_type;
    onnxa__text name;
    uint64_t rank;
    int64_t dims[ONNXA_MAX_DIMS]; /* the first ones */
    int has_negative_dim;         /* as a varint, such a dim is 2^63 or more */
    size_t pairs;
    onnxa__pairs location, offset, length, checksum, other;
} onnxa__tensor;

typedef struct onnxa__walk {
    onnxa *a;
    onnxa_model *model;
    onnxa_error *error;
    unsigned depth;
} onnxa__walk;

static onnxa__text onnxa__as_text(onnxa__slice content) {
    onnxa__text text;
    text.at = (const char *)content.at;
    text.length = (size_t)(content.end - content.at);
    return text;
}

static int onnxa__equals(onnxa__text text, const char *other) {
    return text.length == strlen(other) && !memcmp(text.at, other, text.length);
}

static void onnxa__add_dim(onnxa__tensor *tensor, uint64_t dim) {
    if (dim >> 63)
        tensor->has_negative_dim = 1;
    else if (tensor->rank < ONNXA_MAX_DIMS)
        tensor->dims[tensor->rank] = (int64_t)dim;
    tensor->rank++;
}

static void onnxa__add_pair(onnxa__tensor *tensor, onnxa__slice message) {
    onnxa__field field;
    onnxa__text key = {"", 0}, value = {"", 0};
    onnxa__pairs *pairs;
    while (onnxa__next(&message, &field)) {
        if (field.wire == 2 && field.number == 1) key = onnxa__as_text(field.content);
        if (field.wire == 2 && field.number == 2) value = onnxa__as_text(field.content);
    }
    pairs = onnxa__equals(key, "location")   ? &tensor->location
            : onnxa__equals(key, "offset")   ? &tensor->offset
            : onnxa__equals(key, "length")   ? &tensor->length
            : onnxa__equals(key, "checksum") ? &tensor->checksum
                                             : &tensor->other;
    pairs->count++;
    pairs->value = value;
    tensor->pairs++;
}

static void onnxa__merge_tensor(onnxa__tensor *tensor, onnxa__slice message) {
    onnxa__field field;
    tensor->is_there = 1;
    while (onnxa__next(&message, &field)) {
        int is_varint = field.wire == 0, has_length = field.wire == 2;
        int is_packed = has_length && field.content.at < field.content.end;
        switch (field.number) {
        case 1: /* dims */
            if (is_varint) onnxa__add_dim(tensor, field.value);
            while (has_length && field.content.at < field.content.end) {
                if (!onnxa__varint(&field.content, 10, &field.value)) break;
                onnxa__add_dim(tensor, field.value);
            }
            break;
        case 2: /* data_type */
            if (is_varint) tensor->data_type = (uint32_t)(field.value & 0xFFFFFFFFu);
            break;
        case 3: /* segment */
            if (has_length) tensor->has_segment = 1;
            break;
        case 4: /* float_data */
            if (is_packed || field.wire == 5) tensor->has_elements = 1;
            break;
        case 5:  /* int32_data */
        case 7:  /* int64_data */
        case 11: /* uint64_data */
            if (is_packed || is_varint) tensor->has_elements = 1;
            break;
        case 6: /* string_data; an empty string is an element */
            if (has_length) tensor->has_elements = 1;
            break;
        case 8: /* name */
            if (has_length) tensor->name = onnxa__as_text(field.content);
            break;
        case 9: /* raw_data */
            if (has_length) tensor->has_raw_data = 1;
            break;
        case 10: /* double_data */
            if (is_packed || field.wire == 1) tensor->has_elements = 1;
            break;
        case 13: /* external_data */
            if (has_length) onnxa__add_pair(tensor, field.content);
            break;
        case 14: /* data_location: DEFAULT 0, EXTERNAL 1; any other counts as an unknown field */
            if (is_varint && (field.value & 0xFFFFFFFFu) <= 1)
                tensor->is_external = (int)(field.value & 1);
            break;
        default:
            break;
        }
    }
}

static onnxa_status onnxa__refuse_tensor(onnxa__walk *walk, const char *rule,
                                         const onnxa_entry *entry, const onnxa__tensor *tensor,
                                         const char *text, uint64_t first, uint64_t second) {
    onnxa_error *error = walk->error;
    onnxa__refuse(error, rule, entry ? entry : walk->model->entry, text, first, second);
    onnxa__show(error->tensor, sizeof error->tensor, tensor->name.at, tensor->name.length);
    return ONNXA_REFUSED;
}

static const onnxa_entry *onnxa__find(const onnxa *a, const char *name, size_t length) {
    size_t low = 0, high = a->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        const onnxa_entry *entry = &a->entries[a->by_name[middle]];
        int order = onnxa__compare_names(entry->name, entry->name_length, name, length);
        if (!order)
            return entry->name_length == length && !memcmp(entry->name, name, length) ? entry : NULL;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

/* True if `text` is `number` in decimal digits without leading zeros. */
static int onnxa__is_decimal(onnxa__text text, uint64_t number) {
    char digits[21];
    onnxa__write(digits, sizeof digits, "%", number, 0);
    return onnxa__equals(text, digits);
}

static onnxa_status onnxa__append(onnxa__walk *walk, const onnxa__tensor *tensor,
                                  const onnxa_entry *entry) {
    onnxa *a = walk->a;
    onnxa_tensor *added;
    int64_t *dims = NULL;
    size_t rank = (size_t)tensor->rank;
    if (a->tensor_count == a->tensor_capacity) {
        size_t capacity = a->tensor_capacity ? 2 * a->tensor_capacity : 64;
        onnxa_tensor *larger = (onnxa_tensor *)onnxa__allocate(a, capacity, sizeof *larger);
        if (!larger)
            return onnxa__no_memory(a, walk->error, (uint64_t)capacity * sizeof *larger);
        if (a->tensor_count) memcpy(larger, a->tensors, a->tensor_count * sizeof *larger);
        onnxa__release(a, a->tensors, a->tensor_capacity, sizeof *larger);
        a->tensors = larger;
        a->tensor_capacity = capacity;
    }
    if (rank) {
        dims = onnxa__allocate_dims(a, rank);
        if (!dims) return onnxa__no_memory(a, walk->error, onnxa__next_block_size(a));
        memcpy(dims, tensor->dims, rank * sizeof *dims);
    }
    added = &a->tensors[a->tensor_count];
    memset(added, 0, sizeof *added);
    added->name = tensor->name.at;
    added->name_length = tensor->name.length;
    added->model = walk->model;
    added->entry = entry;
    added->data_type = (int)tensor->data_type;
    added->rank = rank;
    added->dims = dims;
    if (tensor->checksum.count) {
        added->checksum = tensor->checksum.value.at;
        added->checksum_length = tensor->checksum.value.length;
    }
    a->last[entry - a->entries] = (uint32_t)a->tensor_count++;
    walk->model->tensor_count++;
    return ONNXA_OK;
}

static onnxa_status onnxa__finish_tensor(onnxa__walk *walk, const onnxa__tensor *tensor) {
    onnxa *a = walk->a;
    const onnxa_entry *entry;
    uint64_t product = 1, limit, elements, expected;
    unsigned bits;
    size_t i;
    uint32_t last;
    if (tensor->pairs && !tensor->is_external)
        return onnxa__refuse_tensor(walk, "DATA-7", NULL, tensor,
                                    "external_data in a tensor that is not external", 0, 0);
    if (!tensor->is_external) return ONNXA_OK;
    if (tensor->has_segment || tensor->has_raw_data || tensor->has_elements)
        return onnxa__refuse_tensor(walk, "DATA-7", NULL, tensor,
                                    "an external tensor with data in the model, or a segment", 0,
                                    0);
    if (tensor->location.count != 1 || tensor->offset.count > 1 || tensor->length.count > 1 ||
        tensor->checksum.count > 1 || tensor->other.count)
        return onnxa__refuse_tensor(walk, "DATA-4", NULL, tensor,
                                    "external_data has no location, or an unknown or repeated key",
                                    0, 0);
    entry = onnxa__find(a, tensor->location.value.at, tensor->location.value.length);
    if (!entry || entry->kind != ONNXA_TENSOR_DATA)
        return onnxa__refuse_tensor(walk, "DATA-1", NULL, tensor,
                                    "the location (% bytes) is not the key of an entry",
                                    tensor->location.value.length, 0);
    last = a->last[entry - a->entries];
    if (last != ONNXA__NONE && a->tensors[last].model == walk->model)
        return onnxa__refuse_tensor(walk, "DATA-3", entry, tensor,
                                    "two tensors of one model have this location", 0, 0);
    bits = tensor->data_type < ONNXA__TYPES ? onnxa__types[tensor->data_type].bits : 0;
    if (!bits)
        return onnxa__refuse_tensor(walk, "TENSOR-1", entry, tensor,
                                    "the data type % is not one of external tensors",
                                    tensor->data_type, 0);
    if (tensor->rank > ONNXA_MAX_DIMS)
        return onnxa__refuse_tensor(walk, "TENSOR-2", entry, tensor, "% dims, expected at most %",
                                    tensor->rank, ONNXA_MAX_DIMS);
    if (tensor->has_negative_dim)
        return onnxa__refuse_tensor(walk, "TENSOR-2", entry, tensor, "a dim is negative", 0, 0);
    limit = (uint64_t)INT64_MAX / (bits < 8 ? 1 : bits / 8);
    for (i = 0; i < tensor->rank; i++) {
        uint64_t dim = (uint64_t)tensor->dims[i];
        if (!dim) continue;
        if (dim > limit / product)
            return onnxa__refuse_tensor(walk, "TENSOR-2", entry, tensor,
                                        "the dims and an element of % bits give 2^63 bytes or more",
                                        bits, 0);
        product *= dim;
    }
    elements = onnxa__elements(tensor->dims, (size_t)tensor->rank);
    expected = elements / 8 * bits + (elements % 8 * bits + 7) / 8;
    if (entry->size != expected)
        return onnxa__refuse_tensor(walk, "TENSOR-3", entry, tensor,
                                    "the entry has % bytes, its tensor %", entry->size, expected);
    if (tensor->offset.count && !onnxa__equals(tensor->offset.value, "0"))
        return onnxa__refuse_tensor(walk, "DATA-5", entry, tensor, "the offset is not \"0\"", 0, 0);
    if (tensor->length.count && !onnxa__is_decimal(tensor->length.value, entry->size))
        return onnxa__refuse_tensor(walk, "DATA-5", entry, tensor, "the length is not \"%\"",
                                    entry->size, 0);
    if (last != ONNXA__NONE) {
        const onnxa_tensor *other = &a->tensors[last];
        if (other->data_type != (int)tensor->data_type || other->rank != tensor->rank ||
            (other->rank && memcmp(other->dims, tensor->dims, other->rank * sizeof *other->dims)))
            return onnxa__refuse_tensor(walk, "DATA-8", entry, tensor,
                                        "another model has this location with another data type "
                                        "or other dims",
                                        0, 0);
    }
    return onnxa__append(walk, tensor, entry);
}

/* The walk of section 8.1. onnxa__walk_tensor, onnxa__walk_sparse and onnxa__walk_graph take all
 * fields of `parent` with the number `number` as one message. For a field that is not repeated,
 * `parent` is the message that holds the field. For a repeated field, `parent` is one occurrence of
 * the field, from the tag on. */

static onnxa_status onnxa__walk_tensor(onnxa__walk *walk, onnxa__slice parent, uint64_t number) {
    onnxa__tensor tensor;
    onnxa__field field;
    memset(&tensor, 0, sizeof tensor);
    tensor.name.at = "";
    while (onnxa__next_of(&parent, number, &field)) onnxa__merge_tensor(&tensor, field.content);
    return tensor.is_there ? onnxa__finish_tensor(walk, &tensor) : ONNXA_OK;
}

static onnxa_status onnxa__walk_sparse(onnxa__walk *walk, onnxa__slice parent, uint64_t number) {
    uint64_t part;
    for (part = 1; part <= 2; part++) { /* values, indices */
        onnxa__tensor tensor;
        onnxa__field outer, inner;
        onnxa__slice in = parent;
        onnxa_status status;
        memset(&tensor, 0, sizeof tensor);
        tensor.name.at = "";
        while (onnxa__next_of(&in, number, &outer))
            while (onnxa__next_of(&outer.content, part, &inner))
                onnxa__merge_tensor(&tensor, inner.content);
        status = tensor.is_there ? onnxa__finish_tensor(walk, &tensor) : ONNXA_OK;
        if (status) return status;
    }
    return ONNXA_OK;
}

static onnxa_status onnxa__walk_graph(onnxa__walk *walk, onnxa__slice parent, uint64_t number);

/* Walks the attributes of a node or a function: the fields of `parent` with this number. */
static onnxa_status onnxa__walk_attributes(onnxa__walk *walk, onnxa__slice parent,
                                           uint64_t number) {
    onnxa__field attribute, field;
    while (onnxa__next_of(&parent, number, &attribute)) {
        onnxa_status status = onnxa__walk_tensor(walk, attribute.content, 5); /* t */
        onnxa__slice in = attribute.content;
        while (!status && onnxa__next_of(&in, 10, &field)) /* tensors */
            status = onnxa__walk_tensor(walk, field.whole, 10);
        if (!status) status = onnxa__walk_graph(walk, attribute.content, 6); /* g */
        in = attribute.content;
        while (!status && onnxa__next_of(&in, 11, &field)) /* graphs */
            status = onnxa__walk_graph(walk, field.whole, 11);
        if (!status) status = onnxa__walk_sparse(walk, attribute.content, 22); /* sparse_tensor */
        in = attribute.content;
        while (!status && onnxa__next_of(&in, 23, &field)) /* sparse_tensors */
            status = onnxa__walk_sparse(walk, field.whole, 23);
        if (status) return status;
    }
    return ONNXA_OK;
}

/* Recursive through attributes, as deep as onnxa__check_encoding allows. */
static onnxa_status onnxa__walk_graph(onnxa__walk *walk, onnxa__slice parent, uint64_t number) {
    static const uint64_t parts[] = {5, 15, 1}; /* initializer, sparse_initializer, node */
    onnxa_status status = ONNXA_OK;
    size_t i;
    if (walk->depth > ONNXA__MAX_DEPTH / 3) return ONNXA_OK; /* the memory has changed */
    walk->depth++;
    for (i = 0; i < 3 && !status; i++) {
        onnxa__slice in = parent;
        onnxa__field graph, field;
        while (!status && onnxa__next_of(&in, number, &graph))
            while (!status && onnxa__next_of(&graph.content, parts[i], &field))
                status = parts[i] == 5    ? onnxa__walk_tensor(walk, field.whole, 5)
                         : parts[i] == 15 ? onnxa__walk_sparse(walk, field.whole, 15)
                                          : onnxa__walk_attributes(walk, field.content, 5);
    }
    walk->depth--;
    return status;
}

static onnxa_status onnxa__walk_model(onnxa *a, onnxa_model *model, onnxa_error *error) {
    onnxa__walk walk;
    onnxa__slice whole, in;
    onnxa__field outer, field;
    onnxa_status status;
    walk.a = a;
    walk.model = model;
    walk.error = error;
    walk.depth = 0;
    whole.at = model->data;
    whole.end = model->data + (size_t)model->entry->size;
    status = onnxa__walk_graph(&walk, whole, 7);
    in = whole;
    while (!status && onnxa__next_of(&in, 20, &outer)) { /* training_info */
        status = onnxa__walk_graph(&walk, outer.content, 1);
        if (!status) status = onnxa__walk_graph(&walk, outer.content, 2);
    }
    in = whole;
    while (!status && onnxa__next_of(&in, 25, &outer)) { /* functions */
        onnxa__slice nodes = outer.content;
        status = onnxa__walk_attributes(&walk, outer.content, 11);
        while (!status && onnxa__next_of(&nodes, 7, &field))
            status = onnxa__walk_attributes(&walk, field.content, 5);
    }
    return status;
}

/* ---- Data: ZIP-15, DATA-6, TENSOR-4, TENSOR-5 ---- */

static void onnxa__make_crc_table(onnxa *a) {
    uint32_t i, bit, slice;
    for (i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        a->crc_table[0][i] = crc;
    }
    for (slice = 1; slice < 8; slice++)
        for (i = 0; i < 256; i++) {
            uint32_t crc = a->crc_table[slice - 1][i];
            a->crc_table[slice][i] = crc >> 8 ^ a->crc_table[0][crc & 0xFF];
        }
}

/* Continues an inverted CRC-32, eight bytes at a time. */
static uint32_t onnxa__crc(const onnxa *a, uint32_t crc, const uint8_t *at, size_t size) {
    const uint32_t(*t)[256] = a->crc_table;
    for (; size >= 8; size -= 8, at += 8) {
        uint32_t low = crc ^ onnxa__u32(at), high = onnxa__u32(at + 4);
        crc = t[7][low & 0xFF] ^ t[6][low >> 8 & 0xFF] ^ t[5][low >> 16 & 0xFF] ^ t[4][low >> 24] ^
              t[3][high & 0xFF] ^ t[2][high >> 8 & 0xFF] ^ t[1][high >> 16 & 0xFF] ^
              t[0][high >> 24];
    }
    for (; size; size--, at++) crc = crc >> 8 ^ t[0][(crc ^ *at) & 0xFF];
    return crc;
}

static uint32_t onnxa__rotate(uint32_t value, unsigned by) {
    return value << by | value >> (32 - by);
}

static void onnxa__sha1_block(uint32_t state[5], const uint8_t *block) {
    uint32_t w[80], a = state[0], b = state[1], c = state[2], d = state[3], e = state[4];
    unsigned i;
    for (i = 0; i < 16; i++, block += 4)
        w[i] = (uint32_t)block[0] << 24 | (uint32_t)block[1] << 16 | (uint32_t)block[2] << 8 |
               (uint32_t)block[3];
    for (; i < 80; i++) w[i] = onnxa__rotate(w[i - 3] ^ w[i - 8] ^ w[i - 14] ^ w[i - 16], 1);
    for (i = 0; i < 80; i++) {
        uint32_t f = i < 20   ? ((b & c) | (~b & d)) + 0x5A827999u
                     : i < 40 ? (b ^ c ^ d) + 0x6ED9EBA1u
                     : i < 60 ? ((b & c) | (b & d) | (c & d)) + 0x8F1BBCDCu
                              : (b ^ c ^ d) + 0xCA62C1D6u;
        f += onnxa__rotate(a, 5) + e + w[i];
        e = d;
        d = c;
        c = onnxa__rotate(b, 30);
        b = a;
        a = f;
    }
    state[0] += a;
    state[1] += b;
    state[2] += c;
    state[3] += d;
    state[4] += e;
}

/* The SHA-1 (FIPS 180-4) in 40 lower-case hexadecimal digits. */
static void onnxa__sha1(const uint8_t *data, size_t size, char digits[40]) {
    uint32_t state[5] = {0x67452301u, 0xEFCDAB89u, 0x98BADCFEu, 0x10325476u, 0xC3D2E1F0u};
    uint8_t end[128] = {0};
    size_t left = size % 64, blocks = left < 56 ? 64 : 128, i;
    for (i = 0; i + 64 <= size; i += 64) onnxa__sha1_block(state, data + i);
    if (left) memcpy(end, data + i, left);
    end[left] = 0x80;
    for (i = 0; i < 8; i++) end[blocks - 1 - i] = (uint8_t)((uint64_t)size << 3 >> 8 * i & 0xFF);
    onnxa__sha1_block(state, end);
    if (blocks == 128) onnxa__sha1_block(state, end + 64);
    for (i = 0; i < 40; i++)
        digits[i] = "0123456789abcdef"[state[i / 8] >> (28 - i % 8 * 4) & 0xF];
}

static onnxa_status onnxa__check_crc(const onnxa *a, const onnxa_entry *entry, onnxa_error *error) {
    uint32_t crc = ~onnxa__crc(a, 0xFFFFFFFFu, a->data + entry->data_offset, (size_t)entry->size);
    if (crc == entry->crc32) return ONNXA_OK;
    return onnxa__refuse(error, "ZIP-15", entry, "the data has the CRC-32 %, the directory states %",
                         crc, entry->crc32);
}

static onnxa_status onnxa__check_data(const onnxa *a, const onnxa_entry *entry,
                                      onnxa_error *error) {
    const uint8_t *data = a->data + entry->data_offset;
    const onnxa_tensor *tensor;
    size_t i, size = (size_t)entry->size;
    char sha1[40];
    int has_sha1 = 0;
    onnxa_status status = onnxa__check_crc(a, entry, error);
    if (status) return status;
    for (tensor = entry->tensors; tensor; tensor = tensor->same_data) {
        if (!tensor->checksum) continue;
        if (!has_sha1) onnxa__sha1(data, size, sha1);
        has_sha1 = 1;
        if (tensor->checksum_length != 40 || memcmp(tensor->checksum, sha1, 40))
            return onnxa__refuse(error, "DATA-6", entry,
                                 "the checksum (% bytes) is not the SHA-1 of the data",
                                 tensor->checksum_length, 0);
    }
    tensor = entry->tensors; /* all of them have the same data type and dims */
    if (tensor && tensor->data_type == ONNXA__BOOL)
        for (i = 0; i < size; i++)
            if (data[i] > 1)
                return onnxa__refuse(error, "TENSOR-5", entry, "byte % of a BOOL tensor is %", i,
                                     data[i]);
    if (tensor && size && onnxa__types[tensor->data_type].bits < 8) {
        uint64_t elements = onnxa__elements(tensor->dims, tensor->rank) % 8;
        unsigned used = (unsigned)elements * onnxa__types[tensor->data_type].bits % 8;
        if (used && data[size - 1] >> used)
            return onnxa__refuse(error, "TENSOR-4", entry,
                                 "the last byte is %, of which only % bits are used",
                                 data[size - 1], used);
    }
    return ONNXA_OK;
}

/* ---- Opening ---- */

/* Checks and walks all models. Then refuses a key without a tensor (DATA-2), and links each entry
 * to its tensors. */
static onnxa_status onnxa__read_models(onnxa *a, onnxa_error *error) {
    onnxa_status status;
    uint32_t *spare;
    size_t i, begin = 0;
    a->last = (uint32_t *)onnxa__allocate(a, a->count, sizeof *a->last);
    if (!a->last) return onnxa__no_memory(a, error, (uint64_t)a->count * sizeof *a->last);
    for (i = 0; i < a->count; i++) a->last[i] = ONNXA__NONE;
    for (i = 0; i < a->model_count; i++) {
        const onnxa_entry *entry = a->models[i].entry;
        a->models[i].data = a->data + entry->data_offset;
        status = onnxa__check_header(a, entry, error);
        if (!status) status = onnxa__check_crc(a, entry, error);
        if (!status) status = onnxa__check_encoding(a, &a->models[i], error);
        if (status) return status;
    }
    for (i = 0; i < a->model_count; i++) {
        status = onnxa__walk_model(a, &a->models[i], error);
        if (status) return status;
    }
    for (i = 0; i < a->count; i++)
        if (a->entries[i].kind == ONNXA_TENSOR_DATA && a->last[i] == ONNXA__NONE)
            return onnxa__refuse(error, "DATA-2", &a->entries[i],
                                 "no tensor of a model has this location", 0, 0);
    for (i = a->tensor_count; i--;) {
        onnxa_tensor *tensor = &a->tensors[i];
        onnxa_entry *entry = &a->entries[tensor->entry - a->entries];
        tensor->same_data = entry->tensors;
        entry->tensors = tensor;
    }
    if (!a->tensor_count) return ONNXA_OK;
    a->by_tensor_name = (uint32_t *)onnxa__allocate(a, a->tensor_count, sizeof *spare);
    spare = (uint32_t *)onnxa__allocate(a, a->tensor_count, sizeof *spare);
    if (!a->by_tensor_name || !spare) {
        onnxa__release(a, spare, a->tensor_count, sizeof *spare);
        return onnxa__no_memory(a, error, (uint64_t)a->tensor_count * sizeof *spare);
    }
    for (i = 0; i < a->tensor_count; i++) a->by_tensor_name[i] = (uint32_t)i;
    for (i = 0; i < a->model_count; i++) {
        a->models[i].tensors = a->tensors + begin;
        onnxa__sort(a, a->by_tensor_name + begin, spare, a->models[i].tensor_count,
                    onnxa__compare_tensors);
        begin += a->models[i].tensor_count;
    }
    onnxa__release(a, spare, a->tensor_count, sizeof *spare);
    return ONNXA_OK;
}

/* The order of section 9.2. */
static onnxa_status onnxa__read_all(onnxa *a, onnxa_error *error) {
    onnxa_status status = onnxa__read_ends(a, error);
    if (!status) status = onnxa__read_directory(a, error);
    if (!status) status = onnxa__check_names(a, error);
    if (!status) status = onnxa__check_models(a, error);
    if (!status) status = onnxa__check_places(a, error);
    if (!status) status = onnxa__check_tail(a, error);
    if (!status) status = onnxa__read_models(a, error);
    return status;
}

ONNXA_DEF onnxa_status onnxa_open(onnxa **archive, const void *data, size_t size,
                                  const onnxa_options *options, onnxa_error *error) {
    onnxa start, *a;
    onnxa_error ignored;
    onnxa_status status;
    if (!error) error = &ignored;
    memset(error, 0, sizeof *error);
    *archive = NULL;
    memset(&start, 0, sizeof start);
    if (options) start.options = *options;
    a = (onnxa *)onnxa__allocate(&start, 1, sizeof *a);
    if (!a) return onnxa__no_memory(&start, error, sizeof *a);
    *a = start;
    a->data = (const uint8_t *)data;
    a->size = size;
    onnxa__make_crc_table(a);
    status = onnxa__read_all(a, error);
    if (status)
        onnxa_close(a);
    else
        *archive = a;
    return status;
}

ONNXA_DEF void onnxa_close(onnxa *archive) {
    onnxa end;
    if (!archive) return;
    end = *archive;
    while (end.blocks) {
        onnxa__block *block = end.blocks;
        end.blocks = block->next;
        onnxa__release(&end, block, block->size, 1);
    }
    onnxa__release(&end, end.by_tensor_name, end.tensor_count, sizeof *end.by_tensor_name);
    onnxa__release(&end, end.tensors, end.tensor_capacity, sizeof *end.tensors);
    onnxa__release(&end, end.models, end.model_count, sizeof *end.models);
    onnxa__release(&end, end.last, end.count, sizeof *end.last);
    onnxa__release(&end, end.by_name, end.count, sizeof *end.by_name);
    onnxa__release(&end, end.entries, end.count, sizeof *end.entries);
    onnxa__release(&end, end.directory, end.directory_size + 1, 1);
    onnxa__release(&end, archive, 1, sizeof *archive);
}

/* ---- An open archive ---- */

ONNXA_DEF size_t onnxa_entry_count(const onnxa *archive) { return archive->count; }

ONNXA_DEF const onnxa_entry *onnxa_get_entry(const onnxa *archive, size_t index) {
    return index < archive->count ? &archive->entries[index] : NULL;
}

ONNXA_DEF const onnxa_entry *onnxa_find_entry(const onnxa *archive, const char *name,
                                              size_t length) {
    return onnxa__find(archive, name, length);
}

ONNXA_DEF size_t onnxa_model_count(const onnxa *archive) { return archive->model_count; }

ONNXA_DEF const onnxa_model *onnxa_get_model(const onnxa *archive, size_t index) {
    return index < archive->model_count ? &archive->models[index] : NULL;
}

ONNXA_DEF const onnxa_model *onnxa_find_model(const onnxa *archive, const char *id) {
    size_t i;
    for (i = 0; i < archive->model_count; i++)
        if (!strcmp(archive->models[i].id, id)) return &archive->models[i];
    return NULL;
}

ONNXA_DEF const onnxa_tensor *onnxa_find_tensor(const onnxa *archive, const onnxa_model *model,
                                                const char *name, size_t length) {
    size_t low, high, begin;
    const onnxa_tensor *tensor;
    if (!model->tensor_count) return NULL;
    begin = low = (size_t)(model->tensors - archive->tensors);
    high = begin + model->tensor_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        tensor = &archive->tensors[archive->by_tensor_name[middle]];
        if (onnxa__compare_bytes(tensor->name, tensor->name_length, name, length) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == begin + model->tensor_count) return NULL;
    tensor = &archive->tensors[archive->by_tensor_name[low]];
    return onnxa__compare_bytes(tensor->name, tensor->name_length, name, length) ? NULL : tensor;
}

ONNXA_DEF const uint8_t *onnxa_entry_data(const onnxa *archive, const onnxa_entry *entry,
                                          onnxa_error *error) {
    onnxa_error ignored;
    if (!error) error = &ignored;
    memset(error, 0, sizeof *error);
    if (onnxa__check_header(archive, entry, error)) return NULL;
    return archive->data + entry->data_offset;
}

ONNXA_DEF const uint8_t *onnxa_tensor_data(const onnxa *archive, const onnxa_tensor *tensor,
                                           onnxa_error *error) {
    return onnxa_entry_data(archive, tensor->entry, error);
}

ONNXA_DEF onnxa_status onnxa_check_entry(const onnxa *archive, const onnxa_entry *entry,
                                         onnxa_error *error) {
    onnxa_error ignored;
    onnxa_status status;
    if (!error) error = &ignored;
    memset(error, 0, sizeof *error);
    status = onnxa__check_header(archive, entry, error);
    return status ? status : onnxa__check_data(archive, entry, error);
}

ONNXA_DEF onnxa_status onnxa_check(const onnxa *archive, onnxa_error *error) {
    onnxa_status status = ONNXA_OK;
    size_t i;
    if (error) memset(error, 0, sizeof *error);
    for (i = 0; i < archive->count && !status; i++)
        status = onnxa_check_entry(archive, &archive->entries[i], error);
    return status;
}

#ifdef __cplusplus
}
#endif
#endif /* ONNXA_IMPLEMENTED */
#endif /* ONNXA_IMPLEMENTATION */
