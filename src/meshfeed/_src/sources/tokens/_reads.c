// Reads ranges of stored tokens into one int32 array, without the interpreter's lock.
//
// read(fds, offsets, lengths, places, out, kind, itemsize) returns how many ranges it has read. It stops before the
// first range that it cannot read as a whole, or that holds a token beyond int32: the caller, in Python, reads that one
// again and reports the error. Every argument is checked against the buffers' sizes, so wrong ones raise ValueError.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#define _GNU_SOURCE
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

// What one pread brings at most for several ranges: fits in the L2 cache, together with what it is converted to.
#define BUFFER_BYTES (1 << 17)
// Copying so many unused bytes between two ranges costs less than another system call.
#define MAX_GAP_BYTES 1024
// Tokens that are converted together.
#define BLOCK 64

typedef struct {
    const int64_t *fds, *offsets, *lengths, *places;
    int32_t *out;
    Py_ssize_t count;
    char kind;  // 'u' or 'i'
    int itemsize;
} Batch;

typedef struct {
    char *bytes;
    int64_t capacity;
    int probe;  // whether to find out if a read would wait for a disk
} Buffer;

// Has the disk fetch all ranges from `first` on at once, so that the reads together wait for one access and not for each.
static void fetch_ahead(const Batch *b, Py_ssize_t first) {
#ifdef POSIX_FADV_WILLNEED
    for (Py_ssize_t i = first; i < b->count; i++)
        posix_fadvise((int)b->fds[i], b->offsets[i], b->lengths[i] * b->itemsize, POSIX_FADV_WILLNEED);
#else
    (void)b, (void)first;
#endif
}

// Reads `size` bytes for range `row`; returns 0 if the file ends before.
static int read_fully(const Batch *b, Py_ssize_t row, char *to, int64_t size, Buffer *buffer) {
    int fd = (int)b->fds[row];
    int64_t offset = b->offsets[row];
#ifdef RWF_NOWAIT
    if (buffer->probe) {
        struct iovec part = {to, (size_t)size};
        ssize_t done = preadv2(fd, &part, 1, (off_t)offset, RWF_NOWAIT);
        if (done == (ssize_t)size) return 1;
        if (done < 0 && errno == EAGAIN) fetch_ahead(b, row);  // other errors: the file system cannot tell
        buffer->probe = 0;
    }
#endif
    while (size > 0) {
        ssize_t done = pread(fd, to, (size_t)size, (off_t)offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return 0;
        to += done, offset += done, size -= done;
    }
    return 1;
}

// Converts block by block, each of which is loaded before it is stored: see read_in_place. `part` is vectorized.
#define WIDEN(TYPE, CHECK)                                                        \
    do {                                                                          \
        TYPE part[BLOCK];                                                         \
        for (int64_t first = 0; first < count; first += BLOCK) {                  \
            int64_t size = count - first < BLOCK ? count - first : BLOCK;         \
            memcpy(part, stored + first * (int64_t)sizeof(TYPE), (size_t)size * sizeof(TYPE)); \
            for (int64_t i = 0; i < size; i++) {                                  \
                int32_t token = (int32_t)part[i];                                 \
                out[first + i] = token;                                           \
                CHECK;                                                            \
            }                                                                     \
        }                                                                         \
    } while (0)

// Converts tokens to int32; returns 0 if one does not fit. `wrong` collects bits without a branch in the loop.
static int widen(const char *stored, int64_t count, char kind, int itemsize, int32_t *out) {
    uint64_t wrong = 0;
    if (kind == 'u') {
        uint32_t high = 0;
        switch (itemsize) {
            case 1: WIDEN(uint8_t, (void)0); return 1;
            case 2: WIDEN(uint16_t, (void)0); return 1;
            case 4: WIDEN(uint32_t, high |= part[i]); return !(high >> 31);
            default: WIDEN(uint64_t, wrong |= part[i]); return !(wrong >> 31);
        }
    }
    switch (itemsize) {
        case 1: WIDEN(int8_t, (void)0); return 1;
        case 2: WIDEN(int16_t, (void)0); return 1;
        case 4: WIDEN(int32_t, (void)0); return 1;
        default: WIDEN(int64_t, wrong |= (uint64_t)part[i] ^ (uint64_t)(int64_t)token); return wrong == 0;
    }
}

// Reads one range to the end of its place in `out`, and converts it from there to the start. A token of at most 4 bytes is never
// overwritten before it is loaded, and half of the place is in the cache already when it is written.
static int read_in_place(const Batch *b, Py_ssize_t row, Buffer *buffer) {
    int64_t count = b->lengths[row], size = count * b->itemsize;
    int32_t *out = b->out + b->places[row];
    char *stored = (char *)(out + count) - size;
    return read_fully(b, row, stored, size, buffer) && widen(stored, count, b->kind, b->itemsize, out);
}

// Reads ranges that follow each other in a file with one call; returns how many ranges, or 0.
static Py_ssize_t read_run(const Batch *b, Py_ssize_t first, Buffer *buffer) {
    int64_t begin = b->offsets[first], end = begin + b->lengths[first] * b->itemsize;
    Py_ssize_t last = first + 1;
    for (; last < b->count && b->fds[last] == b->fds[first]; last++) {
        int64_t start = b->offsets[last], stop = start + b->lengths[last] * b->itemsize;
        if (start < b->offsets[last - 1] || start > end + MAX_GAP_BYTES || stop - begin > BUFFER_BYTES) break;
        if (stop > end) end = stop;
    }
    if (last == first + 1 && b->itemsize <= 4) return read_in_place(b, first, buffer);
    if (end - begin > buffer->capacity) {
        int64_t capacity = end - begin > BUFFER_BYTES ? end - begin : BUFFER_BYTES;
        char *larger = realloc(buffer->bytes, (size_t)capacity);
        if (!larger) return 0;
        buffer->bytes = larger, buffer->capacity = capacity;
    }
    if (!read_fully(b, first, buffer->bytes, end - begin, buffer)) {
        if (last == first + 1) return 0;
        last = first + 1;  // only a later range may lie beyond the end of the file
        if (!read_fully(b, first, buffer->bytes, b->lengths[first] * b->itemsize, buffer)) return 0;
    }
    for (Py_ssize_t i = first; i < last; i++) {
        const char *stored = buffer->bytes + (b->offsets[i] - begin);
        if (!widen(stored, b->lengths[i], b->kind, b->itemsize, b->out + b->places[i])) return i - first;
    }
    return last - first;
}

static Py_ssize_t read_all(const Batch *b) {
    Buffer buffer = {NULL, 0, 1};
    Py_ssize_t done = 0;
    while (done < b->count) {
        Py_ssize_t number = read_run(b, done, &buffer);
        if (!number) break;
        done += number;
    }
    free(buffer.bytes);
    return done;
}

static int is_valid(const Batch *b, Py_ssize_t out_count) {
    if ((b->kind != 'u' && b->kind != 'i') || b->count < 0) return 0;
    if (b->itemsize != 1 && b->itemsize != 2 && b->itemsize != 4 && b->itemsize != 8) return 0;
    for (Py_ssize_t i = 0; i < b->count; i++) {
        int64_t length = b->lengths[i], place = b->places[i], offset = b->offsets[i];
        if (length < 0 || length > out_count || place < 0 || place > out_count - length) return 0;
        if (offset < 0 || offset > INT64_MAX - length * b->itemsize || b->fds[i] < 0 || b->fds[i] > INT32_MAX) return 0;
    }
    return 1;
}

static PyObject *py_read(PyObject *self, PyObject *args) {
    Py_buffer fds, offsets, lengths, places, out;
    int kind, itemsize;
    if (!PyArg_ParseTuple(args, "y*y*y*y*w*Ci", &fds, &offsets, &lengths, &places, &out, &kind, &itemsize))
        return NULL;
    PyObject *result = NULL;
    Batch b = {fds.buf,      offsets.buf,   lengths.buf, places.buf, out.buf, (Py_ssize_t)(fds.len / sizeof(int64_t)),
               (char)kind, itemsize};
    if (offsets.len != fds.len || lengths.len != fds.len || places.len != fds.len ||
        !is_valid(&b, (Py_ssize_t)(out.len / sizeof(int32_t)))) {
        PyErr_SetString(PyExc_ValueError, "ranges that do not fit their buffers");
    } else {
        Py_ssize_t done;
        Py_BEGIN_ALLOW_THREADS;
        done = read_all(&b);
        Py_END_ALLOW_THREADS;
        result = PyLong_FromSsize_t(done);
    }
    PyBuffer_Release(&fds), PyBuffer_Release(&offsets), PyBuffer_Release(&lengths);
    PyBuffer_Release(&places), PyBuffer_Release(&out);
    return result;
}

static PyMethodDef methods[] = {
    {"read", py_read, METH_VARARGS, "Reads ranges of tokens; returns how many."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_reads", NULL, -1, methods};

PyMODINIT_FUNC PyInit__reads(void) { return PyModule_Create(&module); }
