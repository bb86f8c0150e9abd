/* Counts every block of memory that a process takes from the C library, for LD_PRELOAD (benchmarks/allocations.py).

   malloc, calloc, realloc, memalign and their relatives, and anonymous private mappings, of at least `threshold` bytes.
   Blocks below it pass by unseen, most of which are Python's own. glibc serves the calls under its internal names. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

#define PLACES (1 << 20)
#define FRAMES 12
#define TRACED (256 << 10)

struct block {
    uintptr_t address;
    size_t size;
    void *frames[FRAMES];
    int depth;
};
static struct block table[PLACES];
static struct block at_peak[4096];
static int listed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long long live, peak, armed;
static size_t threshold = 16 << 10;
static int traces, lost;
static __thread int inside;

static size_t place_of(uintptr_t address) { return (address >> 4) * 0x9E3779B97F4A7C15ull >> 44; }

static void list_now(void) {
    listed = 0;
    for (size_t i = 0; i < PLACES && listed < 4096; i++)
        if (table[i].address > 1 && table[i].size >= TRACED) at_peak[listed++] = table[i];
}

static void add(void *pointer, size_t size) {
    if (!pointer || size < threshold || inside) return;
    struct block one = {.address = (uintptr_t)pointer, .size = size};
    inside = 1;
    if (traces && size >= TRACED) one.depth = backtrace(one.frames, FRAMES);
    pthread_mutex_lock(&lock);
    size_t at = place_of(one.address), tries = 0;
    while (table[at].address > 1 && table[at].address != one.address && tries++ < PLACES) at = (at + 1) % PLACES;
    if (tries >= PLACES) {
        lost++;
    } else {
        if (table[at].address == one.address) live -= table[at].size;
        table[at] = one;
        live += size;
        if (live > peak) peak = live;
        if (armed && live >= armed) armed = 0, list_now();
    }
    pthread_mutex_unlock(&lock);
    inside = 0;
}

/* A place that was used is 1 from then on, so that a search for what came after it goes on. */
static void drop(void *pointer) {
    if (!pointer) return;
    pthread_mutex_lock(&lock);
    size_t at = place_of((uintptr_t)pointer), tries = 0;
    while (table[at].address && table[at].address != (uintptr_t)pointer && tries++ < PLACES) at = (at + 1) % PLACES;
    if (table[at].address == (uintptr_t)pointer) {
        live -= table[at].size;
        table[at].address = table[(at + 1) % PLACES].address ? 1 : 0;
    }
    pthread_mutex_unlock(&lock);
}

void *malloc(size_t size) {
    void *found = __libc_malloc(size);
    add(found, size);
    return found;
}

void *calloc(size_t count, size_t size) {
    void *found = __libc_calloc(count, size);
    add(found, count * size);
    return found;
}

void *realloc(void *before, size_t size) {
    drop(before);
    void *found = __libc_realloc(before, size);
    add(found, size);
    return found;
}

void free(void *pointer) {
    drop(pointer);
    __libc_free(pointer);
}

void *memalign(size_t alignment, size_t size) {
    void *found = __libc_memalign(alignment, size);
    add(found, size);
    return found;
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **found, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) || (alignment & (alignment - 1)) || !alignment) return EINVAL;
    void *made = memalign(alignment, size);
    if (!made && size) return ENOMEM;
    *found = made;
    return 0;
}

void *mmap(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    void *found = (void *)syscall(SYS_mmap, address, size, protection, flags, file, offset);
    if (found != MAP_FAILED && (flags & MAP_ANONYMOUS) && (flags & MAP_PRIVATE) && (protection & PROT_WRITE))
        add(found, size);
    return found;
}

void *mmap64(void *address, size_t size, int protection, int flags, int file, off_t offset) {
    return mmap(address, size, protection, flags, file, offset);
}

int munmap(void *address, size_t size) {
    drop(address);
    return (int)syscall(SYS_munmap, address, size);
}

/* Bytes that live in blocks of at least the threshold. */
long long allocations_live(void) { return live; }

/* The most since the last mark. */
long long allocations_peak(void) { return peak; }

/* Blocks that the table had no place for: above 0 the figures are too low. */
int allocations_lost(void) { return lost; }

/* Begin anew: the peak is what lives now. */
long long allocations_mark(void) {
    pthread_mutex_lock(&lock);
    peak = live;
    pthread_mutex_unlock(&lock);
    return live;
}

/* Keep where large blocks were asked for, and list those alive once `bytes` are. */
void allocations_arm(long long bytes) {
    void *frames[2];
    inside = 1;
    backtrace(frames, 2);
    inside = 0;
    traces = 1;
    armed = bytes;
}

/* Write that list to a file descriptor. */
void allocations_list(int file) {
    inside = 1;
    for (int i = 0; i < listed; i++) {
        dprintf(file, "%zu", at_peak[i].size);
        for (int n = 1; n < at_peak[i].depth; n++) {
            Dl_info info;
            if (!dladdr(at_peak[i].frames[n], &info) || !info.dli_fname) continue;
            const char *slash = strrchr(info.dli_fname, '/');
            dprintf(file, " %.60s", info.dli_sname ? info.dli_sname : slash ? slash + 1 : info.dli_fname);
        }
        dprintf(file, "\n");
    }
    inside = 0;
}
