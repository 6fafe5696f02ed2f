// The keyed permutation of order/permutation.py, which has the same in numpy and describes it.
//
// permute(ids, num_records, column_bits, rows, constants) replaces each of the 64-bit `ids`, all below `num_records`, in
// place. `constants` are the multipliers and offsets of the rounds, two each.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>

// Compiled for three kinds of processor, one of which is chosen at load time: with their wider vectors, two to four times as
// fast. x86-64-v4 multiplies vectors of 64-bit numbers with one instruction, and AVX-512F alone does not.
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#elif defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

enum { ROUND_PAIRS = 3, GROUP = 64 };

typedef struct {
    uint64_t num_records, rows;
    unsigned column_bits;
    const uint64_t *constants;  // [4 * ROUND_PAIRS]
} Network;

static inline uint64_t squared(uint64_t x, const uint64_t *constants) {
    x = x * constants[0] + constants[1];
    return x * x;
}

// At most GROUP ids: as loops over arrays, the rounds of several ids overlap in the processor.
FOR_EACH_PROCESSOR static void permute_group(const Network *n, uint64_t *ids, Py_ssize_t count) {
    uint64_t row[GROUP], column[GROUP];
    for (Py_ssize_t i = 0; i < count; i++) {
        row[i] = ids[i] >> n->column_bits;
        column[i] = ids[i] & ((1ull << n->column_bits) - 1);
    }
    for (int pair = 0; pair < ROUND_PAIRS; pair++) {
        const uint64_t *constants = n->constants + 4 * pair;
        for (Py_ssize_t i = 0; i < count; i++) {
            uint64_t sum = row[i] + ((squared(column[i], constants) >> 32) * n->rows >> 32);
            uint64_t wrapped = sum - n->rows;  // above every row if the sum is below `rows`
            row[i] = wrapped < sum ? wrapped : sum;
            column[i] ^= squared(row[i], constants + 2) >> (64 - n->column_bits);
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) ids[i] = row[i] << n->column_bits | column[i];
}

static void permute(const Network *n, uint64_t *ids, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i += GROUP) permute_group(n, ids + i, count - i < GROUP ? count - i : GROUP);
    for (Py_ssize_t i = 0; i < count; i++)
        while (ids[i] >= n->num_records) permute_group(n, ids + i, 1);  // outside the domain: permuted again
}

// Permuting an id again and again ends only if the id is a record, and all records are in the rectangle.
static int is_valid(const Network *n, const uint64_t *ids, Py_ssize_t count) {
    if (n->column_bits < 1 || n->column_bits > 62 || n->rows < 1 || n->rows > 1ull << 32) return 0;
    if (n->rows > UINT64_MAX >> n->column_bits || n->num_records > n->rows << n->column_bits) return 0;
    uint64_t highest = 0;
    for (Py_ssize_t i = 0; i < count; i++) highest = ids[i] > highest ? ids[i] : highest;
    return highest < n->num_records;
}

static PyObject *py_permute(PyObject *self, PyObject *args) {
    Py_buffer ids, constants;
    unsigned long long num_records, rows;
    Network n;
    if (!PyArg_ParseTuple(args, "w*KIKy*", &ids, &num_records, &n.column_bits, &rows, &constants)) return NULL;
    n.num_records = num_records, n.rows = rows, n.constants = constants.buf;
    Py_ssize_t count = ids.len / (Py_ssize_t)sizeof(uint64_t);
    int valid = constants.len == 4 * ROUND_PAIRS * (Py_ssize_t)sizeof(uint64_t) && is_valid(&n, ids.buf, count);
    if (valid) {
        Py_BEGIN_ALLOW_THREADS;
        permute(&n, ids.buf, count);
        Py_END_ALLOW_THREADS;
    } else {
        PyErr_SetString(PyExc_ValueError, "ids or a network that do not fit the number of records");
    }
    PyBuffer_Release(&ids), PyBuffer_Release(&constants);
    if (!valid) return NULL;
    return Py_NewRef(Py_None);  // not Py_RETURN_NONE: from Python 3.12's headers it takes no reference, which 3.11 needs
}

static PyMethodDef methods[] = {
    {"permute", py_permute, METH_VARARGS, "Permutes record ids in place."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_permutation", NULL, -1, methods};

PyMODINIT_FUNC PyInit__permutation(void) { return PyModule_Create(&module); }
