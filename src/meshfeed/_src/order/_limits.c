// Packing under several limits at once: first fit of vectors, and filling from both ends. order/limits.py has the same in
// Python, and says what each does.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_VISITS = 1024 };  // nodes looked at per item, as in order/limits.py

static int fits(const int32_t *room, const int32_t *size, Py_ssize_t limits) {
    for (Py_ssize_t k = 0; k < limits; k++)
        if (room[k] < size[k]) return 0;
    return 1;
}

// A complete binary tree over the bins: a node has, for each limit, the most room of the bins below it.
static int64_t first_fit(int32_t *tree, int64_t leaves, const int32_t *sizes, Py_ssize_t count, Py_ssize_t limits,
                         const int32_t *capacity, const int32_t *least, int32_t *bins) {
    for (int64_t node = 1; node < 2 * leaves; node++) memcpy(tree + node * limits, capacity, (size_t)limits * 4);
    int64_t number = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        const int32_t *size = sizes + i * limits;
        int64_t node = 1;
        for (int visits = 1;; visits++) {
            if (visits > MAX_VISITS) {
                node = leaves + number;
                break;
            }
            if (fits(tree + node * limits, size, limits)) {
                if (node >= leaves) break;
                node *= 2;
            } else {
                while (node & 1) node >>= 1;
                node++;
            }
        }
        bins[i] = (int32_t)(node - leaves);
        if (node - leaves == number) number++;
        int32_t *room = tree + node * limits;
        for (Py_ssize_t k = 0; k < limits; k++) room[k] -= size[k];
        if (!fits(room, least, limits))
            for (Py_ssize_t k = 0; k < limits; k++) room[k] = -1;
        for (node >>= 1; node; node >>= 1) {
            int32_t *most = tree + node * limits, *left = tree + 2 * node * limits, *right = left + limits;
            int changed = 0;
            for (Py_ssize_t k = 0; k < limits; k++) {
                int32_t larger = left[k] > right[k] ? left[k] : right[k];
                changed |= larger != most[k];
                most[k] = larger;
            }
            if (!changed) break;
        }
    }
    return number;
}

static PyObject *py_first_fit(PyObject *self, PyObject *args) {
    Py_buffer sizes, capacity, bins;
    if (!PyArg_ParseTuple(args, "y*y*w*", &sizes, &capacity, &bins)) return NULL;
    Py_ssize_t limits = capacity.len / 4, count = limits ? sizes.len / (4 * limits) : 0;
    const int32_t *size = sizes.buf, *most = capacity.buf;
    int valid = limits > 0 && count < INT32_MAX / 2 && sizes.len == 4 * limits * count && bins.len == 4 * count;
    for (Py_ssize_t i = 0; valid && i < count * limits; i++) valid = size[i] >= 0 && size[i] <= most[i % limits];
    PyObject *result = NULL;
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "items that do not fit into their bins");
    } else {
        int64_t leaves = 1, number;
        while (leaves < count) leaves *= 2;
        int32_t *tree = malloc((size_t)(2 * leaves * limits) * 4), *least = malloc((size_t)limits * 4);
        if (tree && least) {
            Py_BEGIN_ALLOW_THREADS;
            memcpy(least, most, (size_t)limits * 4);
            for (Py_ssize_t i = 0; i < count * limits; i++)
                if (size[i] < least[i % limits]) least[i % limits] = size[i];
            number = first_fit(tree, leaves, size, count, limits, most, least, bins.buf);
            Py_END_ALLOW_THREADS;
            result = PyLong_FromLongLong(number);
        } else {
            PyErr_NoMemory();
        }
        free(tree), free(least);
    }
    PyBuffer_Release(&sizes), PyBuffer_Release(&capacity), PyBuffer_Release(&bins);
    return result;
}

typedef struct {
    int64_t length, align, before, slots;  // of a sequence; tokens before each piece
    Py_ssize_t count, limits;
    const int32_t *lengths, *sizes, *capacity;
    int32_t *items, *starts, *ends, *bins;  // of the pieces
} Filling;

static int64_t up(int64_t number, int64_t to) { return (number + to - 1) / to; }

static int fits_with(const Filling *f, const int64_t *room, int64_t item, int64_t other) {
    for (Py_ssize_t k = 0; k < f->limits; k++) {
        int64_t more = other < 0 ? 0 : f->sizes[other * f->limits + k];
        if (f->sizes[item * f->limits + k] + more > room[k]) return 0;
    }
    return 1;
}

// `numbers` has room for 2 * limits numbers. Returns the number of pieces; the last one is in the last sequence.
static int64_t fill(const Filling *f, int64_t *numbers) {
    int64_t *rest = numbers, *room = numbers + f->limits, tokens = 0, pieces = 0;
    int64_t low = 0, high = f->count - 1, cut = -1, cut_at = 0;
    memset(rest, 0, (size_t)f->limits * 8);
    for (int64_t i = 0; i < f->count; i++) {
        tokens += up(f->lengths[i] + f->before, f->align) * f->align;
        for (Py_ssize_t k = 0; k < f->limits; k++) rest[k] += f->sizes[i * f->limits + k];
    }
    for (int32_t bin = 0; low <= high || cut >= 0; bin++) {
        int64_t left = f->length, slots = f->slots, items = high - low + 1 + (cut >= 0);
        int64_t sequences = up(tokens, f->length), by_slots = up(items, slots);
        if (by_slots > sequences) sequences = by_slots;
        for (Py_ssize_t k = 0; k < f->limits; k++) {
            room[k] = f->capacity[k];
            if (up(rest[k], room[k]) > sequences) sequences = up(rest[k], room[k]);
        }
        int64_t lows = up(items, sequences) - 1;
        for (;;) {
            int64_t item, start = 0;
            if (cut >= 0) {
                item = cut, start = cut_at, cut = -1;
            } else if (slots == 0 || left <= f->before || low > high) {
                break;
            } else if (lows > 0 && slots > 1 && low < high && fits_with(f, room, low, high) &&
                       up(f->lengths[low] + f->before, f->align) * f->align <= left) {
                item = low++, lows--;
            } else if (fits_with(f, room, high, -1)) {
                item = high--;
            } else if (low < high && fits_with(f, room, low, -1)) {
                item = low++;
            } else {
                break;
            }
            int64_t length = f->lengths[item] - start, most = left - f->before;
            int64_t placed = length < most ? length : most;
            f->items[pieces] = (int32_t)item, f->starts[pieces] = (int32_t)start;
            f->ends[pieces] = (int32_t)(start + placed), f->bins[pieces] = bin;
            pieces++, slots--;
            int64_t taken = up(placed + f->before, f->align) * f->align;
            left -= taken, tokens -= taken;
            if (start == 0)
                for (Py_ssize_t k = 0; k < f->limits; k++) {
                    room[k] -= f->sizes[item * f->limits + k];
                    rest[k] -= f->sizes[item * f->limits + k];
                }
            if (placed < length) {
                cut = item, cut_at = start + placed;
                break;
            }
        }
        if (tokens < 1) tokens = 1;  // a cut may add tokens before a piece, and a gap
    }
    return pieces;
}

static PyObject *py_fill(PyObject *self, PyObject *args) {
    Py_buffer lengths, sizes, capacity, pieces;
    Filling f;
    long long length, align, before, slots;
    if (!PyArg_ParseTuple(args, "y*y*y*LLLLw*", &lengths, &sizes, &capacity, &length, &align, &before, &slots, &pieces))
        return NULL;
    f.length = length, f.align = align, f.before = before, f.slots = slots;
    f.lengths = lengths.buf, f.sizes = sizes.buf, f.capacity = capacity.buf;
    f.count = lengths.len / 4, f.limits = capacity.len / 4;
    Py_ssize_t most = 2 * f.count;  // an item is cut at most once
    f.items = pieces.buf, f.starts = f.items + most, f.ends = f.starts + most, f.bins = f.ends + most;
    int valid = f.count < INT32_MAX / 2 && sizes.len == 4 * f.count * f.limits && pieces.len == 16 * most && align >= 1 &&
                slots >= 1 && before >= 0 && length > before && length <= INT32_MAX && length % (align ? align : 1) == 0;
    for (Py_ssize_t i = 0; valid && i < f.count; i++) valid = f.lengths[i] >= 1 && f.lengths[i] <= length - before;
    for (Py_ssize_t k = 0; valid && k < f.limits; k++) valid = f.capacity[k] >= 1;
    for (Py_ssize_t i = 0; valid && i < f.count * f.limits; i++)
        valid = f.sizes[i] >= 0 && f.sizes[i] <= f.capacity[i % f.limits];
    PyObject *result = NULL;
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "items that do not fit into their bins");
    } else {
        int64_t *numbers = malloc((size_t)(2 * f.limits + 1) * 8), number;
        if (numbers) {
            Py_BEGIN_ALLOW_THREADS;
            number = fill(&f, numbers);
            Py_END_ALLOW_THREADS;
            result = PyLong_FromLongLong(number);
            free(numbers);
        } else {
            PyErr_NoMemory();
        }
    }
    PyBuffer_Release(&lengths), PyBuffer_Release(&sizes), PyBuffer_Release(&capacity), PyBuffer_Release(&pieces);
    return result;
}

static PyMethodDef methods[] = {
    {"first_fit", py_first_fit, METH_VARARGS, "Puts items into bins; returns the number of bins."},
    {"fill", py_fill, METH_VARARGS, "Fills sequences with pieces of items; returns the number of pieces."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_limits", NULL, -1, methods};

PyMODINIT_FUNC PyInit__limits(void) { return PyModule_Create(&module); }
