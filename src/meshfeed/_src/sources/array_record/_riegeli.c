/* Reads records of Riegeli files, the format of ArrayRecord, without holding the GIL.
 *
 * Returns only data whose hashes match, and writes only within the caller's buffers, whatever a file contains. On any
 * failure, the caller falls back to the array_record library, which supports other layouts and compressions and reports
 * damage.
 *
 * Formats: Riegeli/records (doc/riegeli_records_file_format.md of google/riegeli) and ArrayRecord's cpp/layout.proto.
 * Hash: HighwayHash-64 (Alakuijala, Cox and Wassenberg, 2016, arXiv:1612.06257).
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/vfs.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Riegeli files are little-endian, and this reader loads their numbers as they are"
#endif

enum {
  BLOCK_BYTES = 1 << 16, /* every multiple of this offset in a file starts with a block header */
  BLOCK_HEADER_BYTES = 24,
  CHUNK_HEADER_BYTES = 40,
  NEIGHBOR_BYTES = 1 << 18, /* one system call reads adjacent records up to this many bytes */
  FIRST_THREADS = 16, /* for storage that is not a disk, at first */
  MAX_THREADS = 63,   /* for network file systems, which take milliseconds and serve many requests at once */
  PATIENCE_MS = 10,   /* after which further threads read what a disk has been asked for and not given yet */
  PROBES = 4,         /* records of a batch that tell whether its file is in the page cache */
};
static const int64_t MAX_CHUNK_BYTES = INT64_C(1) << 30;

/* ------------------------------------------------------------------------------------------------ HighwayHash-64 */

/* The state is 4 x 4 lanes of 64 bits: four lanes are one vector with AVX2, and two vectors elsewhere. */
#if defined(__x86_64__)
enum { VECTOR_BYTES = 32 };
#define VECTORIZED __attribute__((target("avx2")))
#else
enum { VECTOR_BYTES = 16 };
#define VECTORIZED
#endif
enum { VECTORS = 32 / VECTOR_BYTES };
typedef uint64_t lanes __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef lanes unaligned_lanes __attribute__((aligned(1), may_alias));
typedef struct {
  lanes v0[VECTORS], v1[VECTORS], mul0[VECTORS], mul1[VECTORS];
} hash_state;
#define INLINE static inline __attribute__((always_inline))

/* Byte order of each half of a packet after the "zipper merge" of the hash. */
#define MERGED 3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7

/* Multiplies the low half of each lane of a by the high half of the same lane of b. */
VECTORIZED INLINE lanes multiply_halves(lanes a, lanes b) {
#if defined(__x86_64__)
  return (lanes)_mm256_mul_epu32((__m256i)a, (__m256i)(b >> 32));
#elif defined(__aarch64__)
  return (lanes)vmull_u32(vmovn_u64((uint64x2_t)a), vshrn_n_u64((uint64x2_t)b, 32));
#else
  return (a & 0xffffffff) * (b >> 32);
#endif
}

VECTORIZED INLINE lanes zipper_merge(lanes v) {
#if defined(__x86_64__)
  return (lanes)_mm256_shuffle_epi8((__m256i)v, _mm256_setr_epi8(MERGED, MERGED));
#else
  static const uint8_t merged[16] = {MERGED};
#if defined(__aarch64__)
  return (lanes)vqtbl1q_u8((uint8x16_t)v, vld1q_u8(merged));
#else
  uint8_t from[16], to[16];
  memcpy(from, &v, 16);
  for (int i = 0; i < 16; i++) to[i] = from[merged[i]];
  memcpy(&v, to, 16);
  return v;
#endif
#endif
}

VECTORIZED INLINE void update(hash_state *s, const lanes packet[VECTORS]) {
  for (int i = 0; i < VECTORS; i++) {
    s->v1[i] += s->mul0[i] + packet[i];
    s->mul0[i] ^= multiply_halves(s->v1[i], s->v0[i]);
    s->v0[i] += s->mul1[i];
    s->mul1[i] ^= multiply_halves(s->v0[i], s->v1[i]);
    s->v0[i] += zipper_merge(s->v1[i]);
    s->v1[i] += zipper_merge(s->v0[i]);
  }
}

VECTORIZED INLINE void update_from(hash_state *s, const uint8_t *bytes) {
  lanes packet[VECTORS];
  for (int i = 0; i < VECTORS; i++) packet[i] = *(const unaligned_lanes *)(bytes + i * VECTOR_BYTES);
  update(s, packet);
}

/* A finalization round: the packet is v0 with its halves swapped, and the words of each lane swapped. */
VECTORIZED INLINE void permute_and_update(hash_state *s) {
  lanes packet[VECTORS];
#if defined(__x86_64__)
  packet[0] = (lanes)_mm256_permute4x64_epi64((__m256i)s->v0[0], 0x4e);
#else
  packet[0] = s->v0[1];
  packet[1] = s->v0[0];
#endif
  for (int i = 0; i < VECTORS; i++) packet[i] = packet[i] >> 32 | packet[i] << 32;
  update(s, packet);
}

/* The last 1 to 31 bytes: mixes their count into v0, rotates v1 by it, and fills a packet in a special order. */
VECTORIZED INLINE void update_remainder(hash_state *s, const uint8_t *data, size_t size) {
  uint8_t packet[32] = {0};
  size_t whole = size & ~(size_t)3, rest = size & 3;
  for (int i = 0; i < VECTORS; i++) {
    words v1 = (words)s->v1[i];
    s->v1[i] = (lanes)(v1 << (uint32_t)size | v1 >> (uint32_t)(32 - size));
    s->v0[i] += (uint64_t)size << 32 | size;
  }
  memcpy(packet, data, whole);
  if (size & 16) {
    memcpy(packet + 28, data + size - 4, 4);
  } else if (rest) {
    packet[16] = data[whole];
    packet[17] = data[whole + rest / 2];
    packet[18] = data[size - 1];
  }
  update_from(s, packet);
}

/* The initial state: Riegeli's key, "Riegeli/records\n" twice, mixed into the paper's constants, the digits of pi. */
VECTORIZED INLINE hash_state initial_state(void) {
  static const uint64_t pi[2][4] = {{0xdbe6d5d5fe4cce2f, 0xa4093822299f31d0, 0x13198a2e03707344, 0x243f6a8885a308d3},
                                    {0x3bd39e10cb0ef593, 0xc0acf169b5f18a8c, 0xbe5466cf34e90c6c, 0x452821e638d01377}};
  static const uint64_t key[4] = {0x2f696c6567656952, 0x0a7364726f636572, 0x2f696c6567656952, 0x0a7364726f636572};
  hash_state s;
  for (int i = 0; i < VECTORS; i++) {
    lanes k = ((const unaligned_lanes *)key)[i];
    s.mul0[i] = ((const unaligned_lanes *)pi[0])[i];
    s.mul1[i] = ((const unaligned_lanes *)pi[1])[i];
    s.v0[i] = s.mul0[i] ^ k;
    s.v1[i] = s.mul1[i] ^ (k >> 32 | k << 32);
  }
  return s;
}

VECTORIZED static uint64_t highwayhash64(const uint8_t *data, size_t size) {
  hash_state s = initial_state();
  size_t at = 0;
  for (; at + 32 <= size; at += 32) update_from(&s, data + at);
  if (size - at) update_remainder(&s, data + at, size - at);
  for (int round = 0; round < 4; round++) permute_and_update(&s);
  return s.v0[0][0] + s.v1[0][0] + s.mul0[0][0] + s.mul1[0][0];
}

static bool hash_is_supported(void) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2");
#else
  return true;
#endif
}

/* --------------------------------------------------------------------------------------------------------- chunks */

static uint64_t load64(const uint8_t *at) {
  uint64_t value;
  memcpy(&value, at, 8);
  return value;
}

/* Bytes that a chunk at `offset` with `size` bytes of header and data occupies in the file, with block headers. */
static int64_t span_of(int64_t offset, int64_t size) {
  const int64_t usable = BLOCK_BYTES - BLOCK_HEADER_BYTES;
  return size + (size + (offset + usable - 1) % BLOCK_BYTES) / usable * BLOCK_HEADER_BYTES;
}

/* Removes the block headers from `span` bytes read at `offset`. Returns the bytes left; -1 if they end in a header. */
static int64_t join_blocks(uint8_t *chunk, int64_t offset, int64_t span) {
  int64_t header = (BLOCK_BYTES - offset % BLOCK_BYTES) % BLOCK_BYTES;
  if (header >= span) return span;
  int64_t to = header;
  for (; header < span; header += BLOCK_BYTES) {
    int64_t from = header + BLOCK_HEADER_BYTES;
    int64_t stop = header + BLOCK_BYTES < span ? header + BLOCK_BYTES : span;
    if (from >= stop) return -1;
    memmove(chunk + to, chunk + from, (size_t)(stop - from));
    to += stop - from;
  }
  return to;
}

/* Returns the data size of the chunk whose `span` bytes were read at `offset`; -1 if a hash does not match. Makes the
 * header and the data contiguous at `chunk`. */
static int64_t check_chunk(uint8_t *chunk, int64_t offset, int64_t span) {
  int64_t room = join_blocks(chunk, offset, span) - CHUNK_HEADER_BYTES;
  if (room < 0 || load64(chunk) != highwayhash64(chunk + 8, 32)) return -1;
  uint64_t size = load64(chunk + 8);
  if (size > (uint64_t)room) return -1;
  return load64(chunk + 16) == highwayhash64(chunk + CHUNK_HEADER_BYTES, (size_t)size) ? (int64_t)size : -1;
}

/* Reads a varint at *at and advances past it; returns false if it is truncated or longer than 63 bits. */
static bool read_varint(const uint8_t *data, int64_t stop, int64_t *at, int64_t *value) {
  uint64_t found = 0;
  for (int shift = 0; shift < 63 && *at < stop; shift += 7) {
    uint8_t byte = data[(*at)++];
    found |= (uint64_t)(byte & 127) << shift;
    if (byte < 128) {
      *value = (int64_t)found;
      return true;
    }
  }
  return false;
}

static int varint_bytes(int64_t value) {
  int count = 1;
  while (value >>= 7) count++;
  return count;
}

/* ----------------------------------------------------------------------------------------------------------- zstd */

/* The system's libzstd, loaded at run time: nearly every system has it, and the package builds without its headers. */
static struct {
  void *(*create_context)(void);
  size_t (*free_context)(void *);
  size_t (*decompress)(void *, void *, size_t, const void *, size_t);
} zstd;

static void load_zstd(void) {
  static const char *const names[] = {"libzstd.so.1", "libzstd.1.dylib"};
  for (size_t i = 0; i < sizeof names / sizeof *names && !zstd.decompress; i++) {
    void *library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (!library) continue;
    *(void **)&zstd.create_context = dlsym(library, "ZSTD_createDCtx");
    *(void **)&zstd.free_context = dlsym(library, "ZSTD_freeDCtx");
    if (zstd.create_context && zstd.free_context)
      *(void **)&zstd.decompress = dlsym(library, "ZSTD_decompressDCtx");
  }
}

/* Buffers that a reading thread reuses for its next read. */
typedef struct {
  uint8_t *memory;
  size_t size;
  void *context;
} workspace;

static pthread_key_t workspace_key;

static void free_workspace(void *pointer) {
  workspace *w = pointer;
  if (w->context) zstd.free_context(w->context);
  free(w->memory);
  free(w);
}

static workspace *get_workspace(size_t size, bool compressed) {
  workspace *w = pthread_getspecific(workspace_key);
  if (!w) {
    w = calloc(1, sizeof *w);
    if (!w || pthread_setspecific(workspace_key, w)) {
      free(w);
      return NULL;
    }
  }
  if (w->size < size) {
    free(w->memory);
    w->memory = malloc(size);
    w->size = w->memory ? size : 0;
  }
  if (compressed && !w->context) w->context = zstd.create_context();
  return w->memory && (!compressed || w->context) ? w : NULL;
}

/* --------------------------------------------------------------------------------------------------------- records */

/* Whether the file system can report which parts of a file are in the page cache. */
enum { CAN_PROBE, IS_IN_MEMORY, CANNOT_PROBE };
enum { NOT_ASKED, IS_ON_DISK, IS_ELSEWHERE };

typedef struct {
  PyObject_HEAD
  bool compressed;
  atomic_int probe;
  atomic_int storage;
  int64_t count;
  int64_t width;    /* bytes of every record, or 0 if they differ */
  int64_t *offsets; /* int64[count + 1]: starts of the chunks, and the end of the last one */
  int64_t *sizes;   /* int64[count]: sizes of the records in bytes; NULL if they have one width */
} index_object;

/* Without a table if there is a width: in a batch of small records, each look-up is a cache miss. */
static int64_t size_of(const index_object *index, int64_t row) {
  return index->width ? index->width : index->sizes[row];
}

/* Bytes of record `row`'s chunk in the file. A compressed chunk extends to the next one; otherwise its length is known:
 * the header, 0 for no compression, the byte count of the list of sizes, that list of one varint, and the record. */
static int64_t span_of_row(const index_object *index, int64_t row) {
  int64_t offset = index->offsets[row], size = size_of(index, row);
  if (index->compressed) return index->offsets[row + 1] - offset;
  return span_of(offset, CHUNK_HEADER_BYTES + 2 + varint_bytes(size) + size);
}

/* Copies the record of a checked chunk to `target`; false unless it is one simple record of `size` bytes. */
static bool take_record(const uint8_t *chunk, int64_t data_size, int64_t size, uint8_t *target, workspace *w) {
  const uint64_t one_simple_record = 'r' | 1 << 8;
  if (load64(chunk + 24) != one_simple_record || load64(chunk + 32) != (uint64_t)size || !data_size) return false;
  const uint8_t *data = chunk + CHUNK_HEADER_BYTES;
  int64_t at = 1, list_bytes, decoded;
  if (!read_varint(data, data_size, &at, &list_bytes) || list_bytes > data_size - at) return false;
  at += list_bytes;
  if (data[0] == 0) {
    if (data_size - at != size) return false;
    memcpy(target, data + at, (size_t)size);
    return true;
  }
  if (data[0] != 'z' || !w->context || !read_varint(data, data_size, &at, &decoded) || decoded != size) return false;
  return zstd.decompress(w->context, target, (size_t)size, data + at, (size_t)(data_size - at)) == (size_t)size;
}

/* A batch, read by the calling thread and, for records that are not in the page cache, by further threads. */
typedef struct {
  index_object **indexes;
  const int64_t *fds;
  const int64_t *file_index; /* NULL: all rows are in the first file */
  const int64_t *rows, *places;
  int64_t count, width;
  uint8_t *out;      /* each record, of `width` bytes, goes to `out + places[i]` */
  uint8_t **targets; /* or, if not NULL, to `targets[i]`; with `width` 0 */
  int64_t *pending; /* first index of each group that was not in the page cache */
  int64_t num_pending;
  atomic_llong next_pending, num_finished;
  pthread_mutex_t lock;
  pthread_cond_t finished; /* signaled when all pending groups have been read */
  atomic_llong bad; /* lowest index that could not be read; `count` if none */
} batch;

static int64_t file_at(const batch *b, int64_t i) { return b->file_index ? b->file_index[i] : 0; }

static void set_bad(batch *b, int64_t i) {
  long long before = atomic_load(&b->bad);
  while (i < before && !atomic_compare_exchange_weak(&b->bad, &before, i)) {
  }
}

/* Returns the end of the group that begins at index i: records consecutive both in the file and in the batch. */
static int64_t end_of_group(const batch *b, int64_t i, int64_t *span) {
  const int64_t file = file_at(b, i), *rows = b->rows;
  const index_object *index = b->indexes[file];
  int64_t offset = index->offsets[rows[i]];
  int64_t end = offset + span_of_row(index, rows[i]);
  int64_t j = i + 1;
  for (; j < b->count && file_at(b, j) == file && rows[j] == rows[j - 1] + 1; j++) {
    int64_t next = index->offsets[rows[j]], next_end = next + span_of_row(index, rows[j]);
    if (next < end || next_end - offset > NEIGHBOR_BYTES) break;
    end = next_end;
  }
  *span = end - offset;
  return j;
}

/* Reads `span` bytes; fewer only at the end of the file or after an error. Retries short and interrupted reads. */
static int64_t read_at(int fd, uint8_t *to, int64_t span, int64_t offset) {
  int64_t done = 0;
  while (done < span) {
    ssize_t got = pread(fd, to + done, (size_t)(span - done), offset + done);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    done += got;
  }
  return done;
}

static bool is_in_memory(int fd) {
#if defined(__linux__)
  struct statfs found;
  return !fstatfs(fd, &found) && ((uint32_t)found.f_type == 0x01021994 || (uint32_t)found.f_type == 0x858458f6); /* tmpfs, ramfs */
#else
  (void)fd;
  return false;
#endif
}

/* Whether the file is on a disk of this machine, which fetches many ranges at once without threads that wait for them. */
static bool is_on_disk(index_object *index, int fd) {
#if defined(__linux__) && defined(POSIX_FADV_WILLNEED)
  static const uint32_t magics[] = {0xEF53 /* ext2 to ext4 */, 0x58465342 /* XFS */, 0x9123683E /* Btrfs */,
                                    0xF2F52010 /* F2FS */, 0x794C7630 /* overlayfs, of containers */};
  if (atomic_load(&index->storage) == NOT_ASKED) {
    struct statfs found;
    bool known = false;
    if (!fstatfs(fd, &found))
      for (size_t i = 0; i < sizeof magics / sizeof *magics; i++) known |= (uint32_t)found.f_type == magics[i];
    atomic_store(&index->storage, known ? IS_ON_DISK : IS_ELSEWHERE);
  }
  return atomic_load(&index->storage) == IS_ON_DISK;
#else
  (void)index, (void)fd;
  return false;
#endif
}

/* Reads `span` bytes if all are in the page cache; otherwise returns false without waiting for storage. */
static bool read_cached(index_object *index, int fd, uint8_t *to, int64_t span, int64_t offset) {
#if defined(RWF_NOWAIT)
  if (atomic_load(&index->probe) == CAN_PROBE) {
    struct iovec vector = {to, (size_t)span};
    ssize_t got = preadv2(fd, &vector, 1, offset, RWF_NOWAIT);
    if (got >= 0) return got == span;
    if (errno == EAGAIN || errno == EINTR) return false;
    atomic_store(&index->probe, is_in_memory(fd) ? IS_IN_MEMORY : CANNOT_PROBE);
  }
#else
  atomic_store(&index->probe, is_in_memory(fd) ? IS_IN_MEMORY : CANNOT_PROBE);
#endif
  return atomic_load(&index->probe) == IS_IN_MEMORY && read_at(fd, to, span, offset) == span;
}

/* Reads the group at index i; false if `only_cached` is set and its bytes are not in the page cache. */
static bool read_group(batch *b, int64_t i, bool only_cached, int64_t *end) {
  int64_t span;
  *end = end_of_group(b, i, &span);
  index_object *index = b->indexes[file_at(b, i)];
  int fd = (int)b->fds[file_at(b, i)];
  int64_t offset = index->offsets[b->rows[i]];
  workspace *w = span > MAX_CHUNK_BYTES ? NULL : get_workspace((size_t)span, index->compressed);
  if (w && only_cached && !read_cached(index, fd, w->memory, span, offset)) return false;
  if (!w || (!only_cached && read_at(fd, w->memory, span, offset) != span)) {
    set_bad(b, i);
    return true;
  }
  for (int64_t k = i; k < *end; k++) {
    int64_t row = b->rows[k], size = size_of(index, row), at = index->offsets[row] - offset, data_size = -1;
    if (!b->width || size == b->width)
      data_size = check_chunk(w->memory + at, index->offsets[row], span_of_row(index, row));
    uint8_t *target = b->targets ? b->targets[k] : b->out + b->places[k];
    if (data_size < 0 || !take_record(w->memory + at, data_size, size, target, w)) {
      set_bad(b, k);
      break;
    }
  }
  return true;
}

/* Reads the next pending group; false if there is none left. */
static bool read_next(batch *b) {
  int64_t end, number = atomic_fetch_add(&b->next_pending, 1);
  if (number >= b->num_pending) return false;
  read_group(b, b->pending[number], false, &end);
  if (atomic_fetch_add(&b->num_finished, 1) + 1 == b->num_pending) {
    pthread_mutex_lock(&b->lock);
    pthread_cond_signal(&b->finished);
    pthread_mutex_unlock(&b->lock);
  }
  return true;
}

static void *read_pending(void *pointer) {
  while (read_next(pointer)) {
  }
  return NULL;
}

/* The time `milliseconds` from now. */
static struct timespec in_ms(clockid_t clock, long milliseconds) {
  struct timespec time;
  clock_gettime(clock, &time);
  time.tv_nsec += milliseconds * 1000000;
  if (time.tv_nsec >= 1000000000) time.tv_sec++, time.tv_nsec -= 1000000000;
  return time;
}

/* Has the disk fetch the group at index i, and does not wait for it; returns the group's end. */
static int64_t ask_for_group(const batch *b, int64_t i) {
  int64_t file = file_at(b, i), span, end = end_of_group(b, i, &span);
#if defined(POSIX_FADV_WILLNEED)
  posix_fadvise((int)b->fds[file], b->indexes[file]->offsets[b->rows[i]], span, POSIX_FADV_WILLNEED);
#endif
  return end;
}

/* Has the disks fetch all pending groups at once and reads them one after another; false if some are not on a disk. */
static bool read_from_disk(batch *b) {
  for (int64_t number = 0; number < b->num_pending; number++) {
    int64_t file = file_at(b, b->pending[number]);
    if (!is_on_disk(b->indexes[file], (int)b->fds[file])) return false;
  }
  for (int64_t number = 0; number < b->num_pending; number++) ask_for_group(b, b->pending[number]);
  struct timespec now, deadline = in_ms(CLOCK_MONOTONIC, PATIENCE_MS);
  while (read_next(b)) { /* which waits for the first of them most */
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec > deadline.tv_sec || (now.tv_sec == deadline.tv_sec && now.tv_nsec > deadline.tv_nsec)) return false;
  }
  return true;
}

/* Has disks of this machine fetch the batch if one of a few of its records is not in the page cache; returns whether. */
static bool ask_disk(const batch *b) {
  bool missing = false;
  for (int64_t probe = 0; b->count && probe < PROBES && !missing; probe++) {
    int64_t i = probe * b->count / PROBES, file = file_at(b, i), span;
    end_of_group(b, i, &span);
    index_object *index = b->indexes[file];
    uint8_t byte; /* from the middle: the first page may also have the end of a record that was read */
    missing = is_on_disk(index, (int)b->fds[file]) &&
              !read_cached(index, (int)b->fds[file], &byte, 1, index->offsets[b->rows[i]] + span / 2) &&
              atomic_load(&index->probe) == CAN_PROBE;
  }
  for (int64_t i = 0; missing && i < b->count;) i = ask_for_group(b, i);
  return missing;
}

/* Waits until all pending groups have been read, but not longer than 2 ms. */
static void wait_briefly(batch *b) {
  struct timespec deadline = in_ms(CLOCK_REALTIME, 2);
  pthread_mutex_lock(&b->lock);
  while (atomic_load(&b->num_finished) < b->num_pending && !pthread_cond_timedwait(&b->finished, &b->lock, &deadline)) {
  }
  pthread_mutex_unlock(&b->lock);
}

static int start_threads(batch *b, pthread_t *threads, int started, int64_t limit) {
  while (started < limit && !pthread_create(&threads[started], NULL, read_pending, b)) started++;
  return started;
}

/* Reads cached groups first; the rest all at once, because storage serves requests in parallel. */
static void read_batch(batch *b) {
  int64_t end, span;
  bool ask = true; /* until one group is not cached: its disk is then asked for all that follow, which costs no more */
  for (int64_t i = 0; i < b->count; i = end) {
    if (ask && read_group(b, i, true, &end)) continue;
    if (!ask) end = end_of_group(b, i, &span);
    b->pending[b->num_pending++] = i;
    ask = ask && !is_on_disk(b->indexes[file_at(b, i)], (int)b->fds[file_at(b, i)]);
  }
  if (!b->num_pending || read_from_disk(b)) return;
  pthread_t threads[MAX_THREADS];
  int64_t wanted = b->num_pending - atomic_load(&b->next_pending) - 1; /* this thread reads too */
  int started = start_threads(b, threads, 0, wanted < FIRST_THREADS ? wanted : FIRST_THREADS);
  if (started < wanted) {
    wait_briefly(b);
    int64_t left = b->num_pending - atomic_load(&b->next_pending);
    if (left > 0) started = start_threads(b, threads, started, started + left < MAX_THREADS ? started + left : MAX_THREADS);
  }
  read_pending(b);
  for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
}

/* -------------------------------------------------------------------------------------------------------- Python */

static PyObject *index_type;

/* Gets a C-contiguous buffer of int64; `count` receives the number of items. */
static bool get_integers(PyObject *object, Py_buffer *view, int64_t *count, int flags) {
  if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags)) return false;
  if (view->itemsize != 8 || !view->format || !strchr("lq", view->format[0]) || view->format[1]) {
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "expected an array of int64");
    return false;
  }
  *count = view->len / 8;
  return true;
}

static int64_t *copy_integers(PyObject *object, int64_t *count) {
  Py_buffer view;
  if (!get_integers(object, &view, count, 0)) return NULL;
  int64_t *copied = malloc((size_t)(view.len ? view.len : 8));
  if (copied) memcpy(copied, view.buf, (size_t)view.len);
  else PyErr_NoMemory();
  PyBuffer_Release(&view);
  return copied;
}

/* Whether offsets and sizes are plausible for a file, with sums that do not overflow. */
static bool are_plausible(const index_object *index) {
  if (index->offsets[0] < 0 || index->offsets[index->count] > INT64_MAX / 4) return false;
  for (int64_t i = 0; i < index->count; i++) {
    if (index->offsets[i + 1] <= index->offsets[i]) return false;
    if (index->sizes[i] < 0 || index->sizes[i] > MAX_CHUNK_BYTES / 2) return false;
  }
  return true;
}

static int64_t common_width(const index_object *index) {
  for (int64_t i = 1; i < index->count; i++) {
    if (index->sizes[i] != index->sizes[0]) return 0;
  }
  return index->count ? index->sizes[0] : 0;
}

static void index_dealloc(PyObject *self) {
  index_object *index = (index_object *)self;
  PyTypeObject *type = Py_TYPE(self);
  free(index->offsets);
  free(index->sizes);
  ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
  Py_DECREF(type);
}

static PyObject *index_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"offsets", "sizes", "compressed", NULL};
  int compressed;
  PyObject *offsets, *sizes;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOp", names, &offsets, &sizes, &compressed)) return NULL;
  index_object *index = (index_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
  if (!index) return NULL;
  int64_t num_offsets = 0;
  index->compressed = compressed;
  index->offsets = copy_integers(offsets, &num_offsets);
  index->sizes = index->offsets ? copy_integers(sizes, &index->count) : NULL;
  if (index->sizes && (num_offsets != index->count + 1 || !are_plausible(index) || (compressed && !zstd.decompress)))
    PyErr_SetString(PyExc_ValueError, "not the offsets and sizes of a file's records");
  if (PyErr_Occurred()) {
    Py_DECREF(index);
    return NULL;
  }
  index->width = common_width(index);
  if (index->width) {
    free(index->sizes);
    index->sizes = NULL;
  }
  return (PyObject *)index;
}

static PyObject *index_width(PyObject *self, void *closure) {
  (void)closure;
  return PyLong_FromLongLong(((index_object *)self)->width);
}

static PyObject *index_nbytes(PyObject *self, void *closure) {
  (void)closure;
  const index_object *index = (index_object *)self;
  return PyLong_FromLongLong(8 * ((index->sizes ? 2 : 1) * index->count + 1));
}

static PyObject *index_on_disk(PyObject *self, void *closure) {
  (void)closure;
  int storage = atomic_load(&((index_object *)self)->storage);
  if (storage == NOT_ASKED) return Py_NewRef(Py_None);
  return PyBool_FromLong(storage == IS_ON_DISK);
}

static int set_index_on_disk(PyObject *self, PyObject *value, void *closure) {
  (void)closure;
  int truth = value ? PyObject_IsTrue(value) : -1;
  if (!value) PyErr_SetString(PyExc_AttributeError, "on_disk cannot be deleted");
  if (truth >= 0) atomic_store(&((index_object *)self)->storage, truth ? IS_ON_DISK : IS_ELSEWHERE);
  return truth < 0 ? -1 : 0;
}

static PyGetSetDef index_properties[] = {
    {"on_disk", index_on_disk, set_index_on_disk,
     "Whether the file is on a disk of this machine, which is asked for many records at once; otherwise threads wait for\n"
     "them. None until a record was not in the page cache.",
     NULL},
    {"width", index_width, NULL, "Bytes of every record; 0 if they differ or there are none.", NULL},
    {"nbytes", index_nbytes, NULL, "Bytes of memory that offsets and sizes take.", NULL},
    {0},
};

static PyType_Slot index_slots[] = {
    {Py_tp_new, index_new},
    {Py_tp_dealloc, index_dealloc},
    {Py_tp_getset, index_properties},
    {Py_tp_doc, "Index(offsets, sizes, compressed)\n--\n\n"
                "Where the records of a file are, one per chunk.\n\n"
                "offsets: int64[n + 1], where chunks begin and where the last one ends. sizes: int64[n], bytes of records."},
    {0},
};

static PyType_Spec index_spec = {
    .name = "meshfeed._src.sources.array_record._riegeli.Index",
    .basicsize = sizeof(index_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = index_slots,
};

/* Checks all rows and places before any read; sets an exception, or `bad` to the first row out of range. */
static bool check_batch(batch *b, int64_t num_files, int64_t num_bytes) {
  for (int64_t i = 0; i < b->count; i++) {
    int64_t file = file_at(b, i);
    if (file < 0 || file >= num_files) {
      PyErr_SetString(PyExc_IndexError, "a file index is out of range");
      return false;
    }
    const index_object *index = b->indexes[file];
    if (b->rows[i] < 0 || b->rows[i] >= index->count) {
      set_bad(b, i);
      return true;
    }
    __builtin_prefetch(&index->offsets[b->rows[i]]); /* in random order, every look-up in a large index is a cache miss */
    if (!b->places) continue;
    if (b->places[i] < 0 || b->width > num_bytes || b->places[i] > num_bytes - b->width) {
      PyErr_SetString(PyExc_ValueError, "out has no room for a record at its place");
      return false;
    }
  }
  return true;
}

static bool get_indexes(batch *b, PyObject *tuple) {
  Py_ssize_t count = PyTuple_Size(tuple);
  b->indexes = malloc(sizeof(index_object *) * (size_t)(count + 1));
  if (!b->indexes) {
    PyErr_NoMemory();
    return false;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject *item = PyTuple_GetItem(tuple, i);
    if (!PyObject_TypeCheck(item, (PyTypeObject *)index_type)) {
      PyErr_SetString(PyExc_TypeError, "indexes must be a sequence of Index");
      return false;
    }
    b->indexes[i] = (index_object *)item;
  }
  return true;
}

/* Returns a list of bytes objects, which the batch fills: nothing else has seen them yet. */
static PyObject *make_records(batch *b) {
  PyObject *records = PyList_New((Py_ssize_t)b->count);
  b->targets = malloc(sizeof(uint8_t *) * (size_t)(b->count + 1));
  if (!b->targets) PyErr_NoMemory();
  for (int64_t i = 0; records && b->targets && i < b->count; i++) {
    PyObject *record = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size_of(b->indexes[file_at(b, i)], b->rows[i]));
    if (!record) break;
    b->targets[i] = (uint8_t *)PyBytes_AsString(record);
    PyList_SetItem(records, (Py_ssize_t)i, record);
  }
  if (PyErr_Occurred()) Py_CLEAR(records);
  return records;
}

/* Returns the records if there are no places, otherwise the number of the first one that cannot be read. If `ask` is set,
 * reads nothing, and returns whether the disk has to fetch some. */
static PyObject *read_checked(batch *b, PyObject *indexes, int64_t num_bytes, bool ask) {
  PyObject *records = NULL;
  bool missing = false;
  atomic_init(&b->bad, b->count);
  b->pending = malloc(sizeof(int64_t) * (size_t)(b->count + 1));
  if (!b->pending) PyErr_NoMemory();
  else if (get_indexes(b, indexes) && check_batch(b, PyTuple_Size(indexes), num_bytes)) {
    bool in_range = atomic_load(&b->bad) == b->count;
    if (in_range && !b->places && !ask) records = make_records(b);
    if (in_range && !PyErr_Occurred()) {
      Py_BEGIN_ALLOW_THREADS
      if (ask) missing = ask_disk(b);
      else read_batch(b);
      Py_END_ALLOW_THREADS
    }
  }
  free(b->indexes);
  free(b->pending);
  free(b->targets);
  if (PyErr_Occurred()) return NULL;
  if (ask) return PyBool_FromLong(missing);
  if (b->places) return PyLong_FromLongLong(atomic_load(&b->bad));
  if (atomic_load(&b->bad) == b->count) return records;
  Py_XDECREF(records);
  return Py_NewRef(Py_None);
}

enum { FDS, FILES, ROWS, PLACES, ARRAYS };

static PyObject *call(PyObject *sequence, PyObject *const arrays[ARRAYS], PyObject *target, long long width, bool ask) {
  PyObject *indexes = PySequence_Tuple(sequence); /* keeps the indexes alive if the sequence changes */
  if (!indexes) return NULL;
  Py_buffer views[ARRAYS] = {0}, out = {0};
  int64_t counts[ARRAYS];
  int got = 0;
  for (; got < ARRAYS; got++) {
    if ((got == FILES || got == PLACES) && arrays[got] == Py_None) continue;
    if (!get_integers(arrays[got], &views[got], &counts[got], 0)) break;
  }
  PyObject *result = NULL;
  bool in_place = arrays[PLACES] != Py_None;
  if (got == ARRAYS && (!in_place || !PyObject_GetBuffer(target, &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE))) {
    batch b = {.fds = views[FDS].buf, .file_index = views[FILES].buf, .rows = views[ROWS].buf, .places = views[PLACES].buf,
               .count = counts[ROWS], .width = in_place ? width : 0, .out = out.buf, .lock = PTHREAD_MUTEX_INITIALIZER,
               .finished = PTHREAD_COND_INITIALIZER};
    bool alike = (!in_place || counts[PLACES] == b.count) && (!views[FILES].obj || counts[FILES] == b.count);
    if (!alike || counts[FDS] != PyTuple_Size(indexes) || (in_place && width <= 0))
      PyErr_SetString(PyExc_ValueError, "arrays differ in length, or width is not positive");
    else
      result = read_checked(&b, indexes, out.len, ask);
    PyBuffer_Release(&out);
  }
  for (int i = 0; i < ARRAYS; i++) PyBuffer_Release(&views[i]);
  Py_DECREF(indexes);
  return result;
}

static PyObject *py_read(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *sequence, *arrays[ARRAYS], *target;
  long long width;
  if (!PyArg_ParseTuple(args, "OOOOOOL:read", &sequence, &arrays[FDS], &arrays[FILES], &arrays[ROWS], &arrays[PLACES], &target, &width))
    return NULL;
  return call(sequence, arrays, target, width, false);
}

static PyObject *py_ask_disk(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *sequence, *arrays[ARRAYS] = {[PLACES] = Py_None};
  if (!PyArg_ParseTuple(args, "OOOO:ask_disk", &sequence, &arrays[FDS], &arrays[FILES], &arrays[ROWS])) return NULL;
  return call(sequence, arrays, Py_None, 0, true);
}

static PyObject *py_read_chunk(PyObject *module, PyObject *args) {
  (void)module;
  int fd;
  long long offset, data_size;
  if (!PyArg_ParseTuple(args, "iLL:read_chunk", &fd, &offset, &data_size)) return NULL;
  if (offset < 0 || data_size < 0 || data_size > MAX_CHUNK_BYTES) return Py_NewRef(Py_None);
  int64_t span = span_of(offset, CHUNK_HEADER_BYTES + data_size), got, found = -1;
  uint8_t *chunk = malloc((size_t)span);
  if (!chunk) return PyErr_NoMemory();
  Py_BEGIN_ALLOW_THREADS
  got = read_at(fd, chunk, span, offset);
  if (got == span) found = check_chunk(chunk, offset, span);
  Py_END_ALLOW_THREADS
  PyObject *result = found == data_size ? PyBytes_FromStringAndSize((char *)chunk, CHUNK_HEADER_BYTES + data_size) : Py_NewRef(Py_None);
  free(chunk);
  return result;
}

static PyObject *py_read_varints(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *target;
  Py_buffer data, out;
  long long start;
  int64_t count, at, done = 0;
  if (!PyArg_ParseTuple(args, "y*LO:read_varints", &data, &start, &target)) return NULL;
  if (!get_integers(target, &out, &count, PyBUF_WRITABLE)) {
    PyBuffer_Release(&data);
    return NULL;
  }
  at = start < 0 ? data.len : start;
  while (done < count && read_varint(data.buf, data.len, &at, (int64_t *)out.buf + done)) done++;
  PyBuffer_Release(&data);
  PyBuffer_Release(&out);
  return PyLong_FromLongLong(done == count ? at : -1);
}

static PyObject *py_inflate(PyObject *module, PyObject *args) {
  (void)module;
  Py_buffer frame;
  long long size;
  if (!PyArg_ParseTuple(args, "y*L:inflate", &frame, &size)) return NULL;
  PyObject *result = NULL;
  workspace *w = zstd.decompress && size >= 0 && size <= MAX_CHUNK_BYTES ? get_workspace(1, true) : NULL;
  if (w && (result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size))) {
    size_t made = zstd.decompress(w->context, PyBytes_AsString(result), (size_t)size, frame.buf, (size_t)frame.len);
    if (made != (size_t)size) {
      Py_DECREF(result);
      result = Py_NewRef(Py_None);
    }
  }
  PyBuffer_Release(&frame);
  return result || PyErr_Occurred() ? result : Py_NewRef(Py_None);
}

static PyObject *py_hash(PyObject *module, PyObject *args) {
  (void)module;
  Py_buffer data;
  if (!PyArg_ParseTuple(args, "y*:hash", &data)) return NULL;
  uint64_t found = highwayhash64(data.buf, (size_t)data.len);
  PyBuffer_Release(&data);
  return PyLong_FromUnsignedLongLong(found);
}

static PyMethodDef functions[] = {
    {"hash", py_hash, METH_VARARGS, "hash(data)\n--\n\nHighwayHash-64 of bytes with Riegeli's key."},
    {"read_chunk", py_read_chunk, METH_VARARGS,
     "read_chunk(fd, offset, data_size)\n--\n\nHeader and data of a chunk, or None unless they match their hashes."},
    {"read_varints", py_read_varints, METH_VARARGS,
     "read_varints(data, start, out)\n--\n\nFills int64 array `out`; returns where the numbers end, -1 if there are too few."},
    {"inflate", py_inflate, METH_VARARGS,
     "inflate(frame, size)\n--\n\nWhat a zstd frame holds, or None unless that is `size` bytes."},
    {"read", py_read, METH_VARARGS,
     "read(indexes, fds, file_index, rows, places, out, width)\n--\n\n"
     "Reads records of several files, without the interpreter's lock.\n\n"
     "indexes: sequence of Index, one per file. fds: int64[files], their descriptors, which the caller keeps open.\n"
     "file_index: int64[n], each record's file, or None for the first. rows: int64[n], rows of their files. places:\n"
     "int64[n], the byte of `out` at which each record goes. width: bytes that each record must have.\n"
     "Returns n, or the first place whose record cannot be read; `out` is undefined then. If places is None, `out`\n"
     "and `width` are ignored: returns the records as a list of bytes, or None if one cannot be read."},
    {"ask_disk", py_ask_disk, METH_VARARGS,
     "ask_disk(indexes, fds, file_index, rows)\n--\n\n"
     "Has disks of this machine fetch the records, for a later read, unless a few of them are all in the page cache.\n\n"
     "Returns whether it had to. Waits for no disk. The arguments are those of read."},
    {0},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_riegeli",
    .m_doc = "Reads and checks records of Riegeli files, which ArrayRecord files are.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__riegeli(void) {
  if (!hash_is_supported()) {
    PyErr_SetString(PyExc_ImportError, "this processor lacks AVX2, with which ArrayRecord files are checked");
    return NULL;
  }
  if (pthread_key_create(&workspace_key, free_workspace)) return PyErr_NoMemory();
  load_zstd();
  PyObject *module = PyModule_Create(&module_def);
  if (!module) return NULL;
  index_type = PyType_FromSpec(&index_spec);
  if (!index_type || PyModule_AddObjectRef(module, "Index", index_type) ||
      PyModule_AddIntConstant(module, "HAS_ZSTD", zstd.decompress != NULL)) {
    Py_DECREF(module);
    return NULL;
  }
  return module;
}
