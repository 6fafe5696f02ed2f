// Best fit: puts pieces into bins of one capacity.
//
// best_fit(lengths, capacity, bins) takes the pieces in the given order. Each goes to the bin with the least room that
// holds it, and to a new bin if there is none; of several bins with that room, to the one that got it last. Writes the
// number of each piece's bin, unless `bins` is empty, and returns the number of bins. order/packing.py has the same in
// Python.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t *top;       // [capacity + 1] the bin that got this room last, or -1
    int32_t *below;     // [pieces] the bin with the same room that got it before, or -1
    uint64_t *rooms;    // bit r: some bin has room r
    uint64_t *summary;  // bit w: rooms[w] is not 0
    int64_t summary_words;
} Bins;

static void push(Bins *b, int32_t bin, int64_t room) {
    b->below[bin] = b->top[room];
    b->top[room] = bin;
    b->rooms[room >> 6] |= 1ull << (room & 63);
    b->summary[room >> 12] |= 1ull << ((room >> 6) & 63);
}

static int32_t pop(Bins *b, int64_t room) {
    int32_t bin = b->top[room];
    b->top[room] = b->below[bin];
    if (b->top[room] < 0) {
        b->rooms[room >> 6] &= ~(1ull << (room & 63));
        if (!b->rooms[room >> 6]) b->summary[room >> 12] &= ~(1ull << ((room >> 6) & 63));
    }
    return bin;
}

// The smallest room of at least `length`, or -1.
static int64_t least_room(const Bins *b, int64_t length) {
    int64_t word = length >> 6;
    uint64_t found = b->rooms[word] >> (length & 63);
    if (found) return length + __builtin_ctzll(found);
    word++;
    int64_t group = word >> 6;
    if (group >= b->summary_words) return -1;
    uint64_t words = b->summary[group] >> (word & 63) << (word & 63);
    while (!words) {
        if (++group >= b->summary_words) return -1;
        words = b->summary[group];
    }
    word = (group << 6) + __builtin_ctzll(words);
    return (word << 6) + __builtin_ctzll(b->rooms[word]);
}

static int64_t best_fit(Bins *b, const int32_t *lengths, Py_ssize_t count, int64_t capacity, int32_t *bins) {
    int32_t number = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int64_t room = least_room(b, lengths[i]);
        int32_t bin;
        if (room < 0) bin = number++, room = capacity;
        else bin = pop(b, room);
        room -= lengths[i];
        if (room) push(b, bin, room);
        if (bins) bins[i] = bin;
    }
    return number;
}

static int is_valid(const int32_t *lengths, Py_ssize_t count, long long capacity) {
    if (capacity < 1 || capacity > INT32_MAX || count > INT32_MAX) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (lengths[i] < 1 || lengths[i] > capacity) return 0;
    return 1;
}

static PyObject *py_best_fit(PyObject *self, PyObject *args) {
    Py_buffer lengths, bins;
    long long capacity;
    if (!PyArg_ParseTuple(args, "y*Lw*", &lengths, &capacity, &bins)) return NULL;
    Py_ssize_t count = lengths.len / (Py_ssize_t)sizeof(int32_t);
    PyObject *result = NULL;
    if ((bins.len && bins.len != lengths.len) || !is_valid(lengths.buf, count, capacity)) {
        PyErr_SetString(PyExc_ValueError, "pieces that do not fit into their bins");
    } else {
        int64_t words = (capacity >> 6) + 1, number = -1;
        Bins b = {malloc(((size_t)capacity + 1) * sizeof(int32_t)), malloc(((size_t)count + 1) * sizeof(int32_t)),
                  calloc((size_t)words, sizeof(uint64_t)), calloc((size_t)(words >> 6) + 1, sizeof(uint64_t)),
                  (words >> 6) + 1};
        if (b.top && b.below && b.rooms && b.summary) {
            Py_BEGIN_ALLOW_THREADS;
            memset(b.top, 0xff, ((size_t)capacity + 1) * sizeof(int32_t));
            number = best_fit(&b, lengths.buf, count, capacity, bins.len ? bins.buf : NULL);
            Py_END_ALLOW_THREADS;
            result = PyLong_FromLongLong(number);
        } else {
            PyErr_NoMemory();
        }
        free(b.top), free(b.below), free(b.rooms), free(b.summary);
    }
    PyBuffer_Release(&lengths), PyBuffer_Release(&bins);
    return result;
}

static PyMethodDef methods[] = {
    {"best_fit", py_best_fit, METH_VARARGS, "Puts pieces into bins; returns the number of bins."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_best_fit", NULL, -1, methods};

PyMODINIT_FUNC PyInit__best_fit(void) { return PyModule_Create(&module); }
