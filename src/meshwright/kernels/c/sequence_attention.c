/* Attention of whole sequences and its gradients, tile by tile (Dao 2022, arXiv:2205.14135).

   No tile of weights is kept: the backward pass makes it again from the log-sum-exp of its queries. Letters: B rows of
   a batch, S positions, H query heads, K key heads, G = H / K, E width of keys and V of values, multiples of 16.

   Operands of products are words of 32 bits. A word is a number in fp32. Where `pair` is 2, it is two numbers in bf16 that
   follow each other in the sum of a product; the processor multiplies and adds both at once. Sums are in fp32. */

#include "vectors.h"

#define TILE 64 /* queries and keys of a tile */
#if defined(__AVX512F__) && defined(__AVX512BF16__)
#define PAIRS 1
#else
#define PAIRS 0
#endif
#define DOWN 6 /* rows, and vectors of WIDE numbers, of which the sums stay in registers */
#if WIDE == 8
#define ACROSS 2
#else
#define ACROSS 4
#endif

/* A tensor (B, S, heads, width), fp32 or, where it is narrow, bf16, by its strides. */
typedef struct {
    char *at;
    int64_t row, position, head, narrow;
} Strided;

/* documents (N, 3): a row, the position where one begins, and the one behind its end. sums, the log-sum-exp: (B, H, S).
   `parts`: in how many parts the query heads of a key head are taken; of_k and of_v have so many times K heads. room:
   for `each` words of each thread. `pairs`: whether products of bf16 may be those of pairs. */
typedef struct {
    Strided q, k, v, out, gradient, of_q, of_k, of_v;
    float *sums, *room;
    const int64_t *documents;
    int64_t count, length, heads, key_heads, width, value_width, window, parts, threads, each, pairs;
    float scale;
} Sequences;

static inline char *part_of(const Strided *x, int64_t row, int64_t position, int64_t head) {
    return x->at + (row * x->row + position * x->position + head * x->head) * (x->narrow ? 2 : 4);
}

static inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* `rows` rows of `width` numbers in fp32, and 0 behind them up to `all` rows. */
static void read_rows(const Strided *x, int64_t row, int64_t position, int64_t head, int64_t rows, int64_t all,
                      int64_t width, float *to) {
    for (int64_t r = 0; r < rows; r++) {
        const char *from = part_of(x, row, position + r, head);
        for (int64_t i = 0; i < width; i += 16) *(lanes *)(to + r * width + i) = read_lanes(from, i, x->narrow);
    }
    memset(to + rows * width, 0, (all - rows) * width * sizeof(float));
}

/* The same in words. */
static inline void read_words(const Strided *x, int64_t row, int64_t position, int64_t head, int64_t rows, int64_t all,
                              int64_t width, float *to, const int pair) {
    if (pair == 1) {
        read_rows(x, row, position, head, rows, all, width, to);
        return;
    }
    char *at = (char *)to;
    for (int64_t r = 0; r < rows; r++) memcpy(at + r * width * 2, part_of(x, row, position + r, head), width * 2);
    memset(at + rows * width * 2, 0, (all - rows) * width * 2);
}

static void write_rows(const Strided *x, int64_t row, int64_t position, int64_t head, int64_t rows,
                       int64_t width, float scale, const float *from) {
    for (int64_t r = 0; r < rows; r++) {
        char *to = part_of(x, row, position + r, head);
        for (int64_t i = 0; i < width; i += 16)
            write_lanes(*(const lanes *)(from + r * width + i) * scale, to, i, x->narrow);
    }
}

#ifdef __clang__
#define SHUFFLED(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define SHUFFLED(A, B, ...) __builtin_shuffle(A, B, (whole_lanes){__VA_ARGS__})
#endif

/* (rows, columns), both multiples of 16, -> (columns, rows): 16 by 16, by exchanging halves of halves. */
static __attribute__((noinline)) void transpose(const float *from, int64_t from_row, int64_t rows, int64_t columns,
                                                float *to, int64_t to_row) {
    for (int64_t r = 0; r < rows; r += 16)
        for (int64_t c = 0; c < columns; c += 16) {
            lanes x[16], y[16];
            for (int i = 0; i < 16; i++) x[i] = *(const lanes *)(from + (r + i) * from_row + c);
#define EXCHANGE(A, B, STEP)                                                                                            \
    for (int i = 0; i < 16; i++)                                                                                        \
        if (!(i & STEP)) {                                                                                              \
            B[i] = SHUFFLED(A[i], A[i + STEP], LOW_##STEP);                                                             \
            B[i + STEP] = SHUFFLED(A[i], A[i + STEP], HIGH_##STEP);                                                     \
        }
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
            EXCHANGE(x, y, 8)
            EXCHANGE(y, x, 4)
            EXCHANGE(x, y, 2)
            EXCHANGE(y, x, 1)
            for (int i = 0; i < 16; i++) *(lanes *)(to + (c + i) * to_row + r) = x[i];
        }
}

typedef int32_t bits __attribute__((aligned(4), may_alias));

#if PAIRS
/* Of two rows the numbers that follow each other in a sum, as words. */
static inline lanes in_pairs(lanes first, lanes second) {
    static const int16_t PLACES[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (lanes)_mm512_permutexvar_epi16(_mm512_loadu_si512(PLACES), both);
}

static inline void write_narrow(lanes found, float *words, int64_t i) {
    _mm256_storeu_si256((__m256i *)((uint16_t *)words + i), (__m256i)_mm512_cvtneps_pbh((__m512)found));
}

static inline wide plus_pairs(wide total, bits left, wide right) {
    return (wide)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(left), (__m512bh)right);
}
#else
static inline lanes in_pairs(lanes first, lanes second) { return first; }
static inline void write_narrow(lanes found, float *words, int64_t i) {}
static inline wide plus_pairs(wide total, bits left, wide right) { return total; }
#endif

/* bf16 (rows, width), rows even, -> words (rows / 2, width), each of two rows. */
static void pair_rows(const float *from, int64_t rows, int64_t width, float *to) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t i = 0; i < width; i += 16) {
            const bit_lanes low = (bit_lanes)read_lanes(from, r * width + i, 1);
            const bit_lanes high = (bit_lanes)read_lanes(from, (r + 1) * width + i, 1);
            *(lanes *)(to + r / 2 * width + i) = (lanes)(low >> 16 | high);
        }
}

static inline __attribute__((always_inline)) void sums_of(const float *a, int64_t a_row, int64_t a_inner,
                                                          const float *b, int64_t b_row, float *c, int64_t c_row,
                                                          int64_t inner, const float *scale, const int pair,
                                                          const int rows, const int across) {
    wide total[DOWN][ACROSS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < across; p++) total[r][p] = scale ? (wide){0} : *(const wide *)(c + r * c_row + WIDE * p);
    for (int64_t i = 0; i < inner; i++) {
        wide right[ACROSS];
        for (int p = 0; p < across; p++) right[p] = *(const wide *)(b + i * b_row + WIDE * p);
        for (int r = 0; r < rows; r++) {
            const float *left = a + r * a_row + i * a_inner;
            for (int p = 0; p < across; p++)
                if (pair == 2) total[r][p] = plus_pairs(total[r][p], *(const bits *)left, right[p]);
                else total[r][p] += *left * right[p];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < across; p++) {
            if (scale) total[r][p] *= *scale;
            *(wide *)(c + r * c_row + WIDE * p) = total[r][p];
        }
}

/* c (rows, columns) = `scale` times, or where that is NULL, += a (rows, inner) b (inner, columns); columns are a multiple
   of 16. Not inlined: a compiler that sees the scale rounds it with what comes next, and both passes must round alike. */
static __attribute__((noinline)) void product(const float *a, int64_t a_row, int64_t a_inner, const float *b,
                                              int64_t b_row, float *c, int64_t c_row, int64_t rows, int64_t inner,
                                              int64_t columns, const float *scale, int pair) {
#define SOME_ROWS(ROWS, VECTORS, PAIR)                                                                                  \
    case (PAIR * 8 + ROWS) * 8 + VECTORS:                                                                               \
        sums_of(a + r * a_row, a_row, a_inner, b + n, b_row, c + r * c_row + n, c_row, inner, scale, PAIR, ROWS,        \
                VECTORS);                                                                                               \
        break;
#if WIDE == 16
#define SOME(ROWS, PAIR) SOME_ROWS(ROWS, 1, PAIR) SOME_ROWS(ROWS, 2, PAIR) SOME_ROWS(ROWS, 3, PAIR) SOME_ROWS(ROWS, 4, PAIR)
#else
#define SOME(ROWS, PAIR) SOME_ROWS(ROWS, ACROSS, PAIR)
#endif
#define EACH_SIZE(PAIR) SOME(1, PAIR) SOME(4, PAIR) SOME(DOWN, PAIR)
    for (int64_t n = 0; n < columns; n += WIDE * ACROSS)
        for (int64_t r = 0, some; r < rows; r += some) {
            some = rows - r >= DOWN ? DOWN : rows - r >= 4 ? 4 : 1; /* each number of rows is code to compile */
            switch ((pair * 8 + some) * 8 + least_of((columns - n) / WIDE, ACROSS)) {
                EACH_SIZE(1)
#if PAIRS
                EACH_SIZE(2)
#endif
            }
        }
}

static const float ONE = 1.0f;
static const lanes COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

typedef struct {
    int64_t row, begin, end;
} Document;

static inline int64_t tiles_of(Document d) { return (d.end - d.begin + TILE - 1) / TILE; }
static inline int64_t up_to_16(int64_t n) { return (n + 15) & ~15; }

/* One tile of queries of all query heads of one key head. Lanes are queries, so that no vector is summed up. */
static inline __attribute__((always_inline)) void attend_tile(const Sequences *s, Document d, int64_t start, int64_t own,
                                                              float *room, const int pair) {
    const int64_t E = s->width, V = s->value_width, inner = E / pair, group = s->heads / s->key_heads;
    const int64_t stop = least_of(start + TILE, d.end), count = stop - start, padded = up_to_16(count), vectors = padded / 16;
    float *q = room, *keys = q + group * TILE * E, *values = keys + TILE * E, *weights = values + TILE * V;
    float *out = weights + TILE * TILE, *rows = out + group * TILE * V;
    lanes most[group][4], total[group][4];
    for (int64_t g = 0; g < group; g++) {
        read_words(&s->q, d.row, start, own * group + g, count, padded, E, rows, pair);
        transpose(rows, inner, padded, inner, q + g * TILE * E, padded);
        memset(out + g * TILE * V, 0, padded * V * sizeof(float));
        for (int64_t p = 0; p < 4; p++) most[g][p] = (lanes){0} - INFINITY, total[g][p] = (lanes){0};
    }
    const int64_t seen = s->window ? most_of(d.begin, start - s->window + 1) : d.begin;
    for (int64_t first = d.begin + (seen - d.begin) / TILE * TILE; first < stop; first += TILE) {
        const int64_t found = least_of(first + TILE, stop) - first;
        const int64_t steps = (found + pair - 1) / pair;
        read_words(&s->k, d.row, first, own, found, found, E, keys, pair);
        read_words(&s->v, d.row, first, own, found, steps * pair, V, pair == 2 ? rows : values, pair);
        if (pair == 2) pair_rows(rows, steps * 2, V, values);
        const int whole = first + TILE <= start + 1 && (!s->window || first > stop - 1 - s->window);
        for (int64_t g = 0; g < group; g++) {
            product(keys, inner, 1, q + g * TILE * E, padded, weights, padded, found, inner, padded, &s->scale, pair);
            for (int64_t p = 0; p < vectors; p++) {
                float *at = weights + 16 * p;
                lanes largest = most[g][p];
                const lanes query = COUNT + (float)(start + 16 * p - first); /* in positions from the first key */
                if (!whole)
                    for (int64_t t = 0; t < found; t++) {
                        lanes *x = (lanes *)(at + t * padded);
                        const lanes key = (lanes){0} + (float)t;
                        const whole_lanes hidden = s->window ? (key > query) | (key <= query - (float)s->window) : key > query;
                        *x = either(hidden, (lanes){0} - INFINITY, *x);
                    }
                for (int64_t t = 0; t < found; t++) largest = larger(largest, *(const lanes *)(at + t * padded));
                const lanes none = {0}, base = either(largest == none - INFINITY, none, largest);
                const lanes again = exponentials(most[g][p] - base);
                lanes sum = total[g][p] * again;
                for (int64_t t = 0; t < found; t += pair) {
                    lanes weight[2] = {{0}, {0}};
                    for (int64_t i = 0; i < least_of(pair, found - t); i++) {
                        const lanes x = *(const lanes *)(at + (t + i) * padded);
                        weight[i] = exponentials(x - base);
                        if (!whole) weight[i] = either(x == none - INFINITY, none, weight[i]);
                        sum += weight[i];
                    }
                    *(lanes *)(at + t / pair * padded) = pair == 2 ? in_pairs(weight[0], weight[1]) : weight[0];
                }
                total[g][p] = sum;
                most[g][p] = largest;
                for (int64_t e = 0; e < V; e++) {
                    lanes *x = (lanes *)(out + g * TILE * V + e * padded + 16 * p);
                    *x = *x * again;
                }
            }
            product(values, 1, V, weights, padded, out + g * TILE * V, padded, V, steps, padded, NULL, pair);
        }
    }
    for (int64_t g = 0; g < group; g++) {
        const int64_t head = own * group + g;
        float *sums = s->sums + (d.row * s->heads + head) * s->length + start, *result = out + g * TILE * V;
        for (int64_t p = 0; p < vectors; p++) {
            const lanes share = 1.0f / total[g][p];
            for (int64_t e = 0; e < V; e++) {
                lanes *x = (lanes *)(result + e * padded + 16 * p);
                *x = *x * share;
            }
            for (int64_t i = 0; i < least_of(16, count - 16 * p); i++)
                sums[16 * p + i] = most[g][p][i] + logf(total[g][p][i]);
        }
        transpose(result, padded, V, padded, rows, V);
        write_rows(&s->out, d.row, start, head, count, V, 1.0f, rows);
    }
}

/* Whether both widths are whole vectors of words. */
static int takes_pairs(const Sequences *s) {
    return PAIRS && s->pairs && s->q.narrow && s->gradient.narrow && s->width % 32 == 0 && s->value_width % 32 == 0;
}

/* Tiles at the ends of documents come first: they see most. Returns 0, or 1 where there was no memory. */
int64_t attend_sequences(const Sequences *s) {
    int64_t *before = malloc((s->count + 1) * sizeof(int64_t)); /* tiles of the documents before each */
    if (!before) return 1;
    const Document *documents = (const Document *)s->documents;
    before[0] = 0;
    for (int64_t n = 0; n < s->count; n++) before[n + 1] = before[n] + tiles_of(documents[n]);
    const int64_t tiles = before[s->count], used = s->threads;
#pragma omp parallel for num_threads(used) schedule(dynamic)
    for (int64_t unit = 0; unit < tiles * s->key_heads; unit++) {
        const int64_t tile = tiles - 1 - unit / s->key_heads;
        int64_t low = 0, high = s->count;
        while (high - low > 1) *(before[(low + high) / 2] <= tile ? &low : &high) = (low + high) / 2;
        const int64_t start = documents[low].begin + (tile - before[low]) * TILE;
        float *room = s->room + this_thread() * s->each;
        if (takes_pairs(s)) attend_tile(s, documents[low], start, unit % s->key_heads, room, 1 + PAIRS);
        else attend_tile(s, documents[low], start, unit % s->key_heads, room, 1);
    }
    free(before);
    return 0;
}

/* One document of one key head and one part of its query heads. Lanes are keys. Scores have the bits that `sums` was
   made of, scale and order alike: of scores of 1e10 a last bit is a factor of e^1000 to a weight. */
static inline __attribute__((always_inline)) void gradients_of(const Sequences *s, Document d, int64_t own, float *room,
                                                               const int pair) {
    const int64_t E = s->width, V = s->value_width, group = s->heads / s->key_heads / s->parts;
    const int64_t key_head = own / s->parts, length = d.end - d.begin;
    float *keys = room, *keys_turned = keys + TILE * E, *values = keys_turned + TILE * E;
    float *values_turned = values + TILE * V, *q = values_turned + TILE * V, *given = q + TILE * E;
    float *weights = given + TILE * V, *of_weights = weights + TILE * TILE, *of_keys = of_weights + TILE * TILE;
    float *of_values = of_keys + TILE * E, *narrow = of_values + TILE * V, *means = narrow + TILE * TILE / 2;
    float *of_q = means + group * length;
    float *q_along = pair == 2 ? q + TILE * E / 2 : q, *given_along = pair == 2 ? given + TILE * V / 2 : given;
    float *key_rows = pair == 2 ? q : keys, *value_rows = pair == 2 ? given : values;
    for (int64_t g = 0; g < group; g++)
        for (int64_t start = 0; start < length; start += TILE) {
            const int64_t count = least_of(TILE, length - start), head = own * group + g;
            read_rows(&s->gradient, d.row, d.begin + start, head, count, count, V, given);
            read_rows(&s->out, d.row, d.begin + start, head, count, count, V, values);
            for (int64_t r = 0; r < count; r++) {
                lanes sum = {0};
                for (int64_t i = 0; i < V; i += 16)
                    sum += *(const lanes *)(given + r * V + i) * *(const lanes *)(values + r * V + i);
                means[g * length + start + r] = sum_of(sum);
            }
        }
    memset(of_q, 0, group * length * E * sizeof(float));
    for (int64_t first = 0; first < length; first += TILE) {
        const int64_t found = least_of(TILE, length - first), padded = up_to_16(found);
        read_words(&s->k, d.row, d.begin + first, key_head, found, padded, E, key_rows, pair);
        read_words(&s->v, d.row, d.begin + first, key_head, found, padded, V, value_rows, pair);
        transpose(key_rows, E / pair, padded, E / pair, keys_turned, padded);
        transpose(value_rows, V / pair, padded, V / pair, values_turned, padded);
        if (pair == 2) pair_rows(key_rows, padded, E, keys);
        memset(of_keys, 0, padded * E * sizeof(float));
        memset(of_values, 0, padded * V * sizeof(float));
        const int64_t end = s->window ? least_of(length, first + found - 1 + s->window) : length;
        for (int64_t g = 0; g < group; g++) {
            const int64_t head = own * group + g;
            const float *sums = s->sums + (d.row * s->heads + head) * s->length + d.begin;
            for (int64_t start = first; start < end; start += TILE) {
                const int64_t count = least_of(TILE, length - start);
                const int64_t steps = (count + pair - 1) / pair;
                read_words(&s->q, d.row, d.begin + start, head, count, steps * pair, E, q, pair);
                read_words(&s->gradient, d.row, d.begin + start, head, count, steps * pair, V, given, pair);
                if (pair == 2) pair_rows(q, steps * 2, E, q_along), pair_rows(given, steps * 2, V, given_along);
                product(q, E / pair, 1, keys_turned, padded, weights, padded, count, E / pair, padded, &s->scale, pair);
                product(given, V / pair, 1, values_turned, padded, of_weights, padded, count, V / pair, padded, &ONE, pair);
                const int whole = start > first && found == TILE && (!s->window || first > start + count - 1 - s->window);
                for (int64_t r = 0; r < count; r += pair)
                    for (int64_t p = 0; p < padded; p += 16) {
                        lanes weight[2] = {{0}, {0}}, of_weight[2] = {{0}, {0}};
                        for (int64_t i = r; i < least_of(count, r + pair); i++) {
                            const lanes x = *(const lanes *)(weights + i * padded + p);
                            lanes found_here = exponentials(x - sums[start + i]);
                            if (!whole) {
                                const lanes key = COUNT + (float)(first + p), query = (lanes){0} + (float)(start + i);
                                const whole_lanes hidden =
                                    s->window ? (key > query) | (key <= query - (float)s->window) : key > query;
                                found_here = either(hidden, (lanes){0}, found_here);
                            }
                            const lanes of_x = *(const lanes *)(of_weights + i * padded + p);
                            weight[i - r] = found_here;
                            of_weight[i - r] = found_here * (of_x - means[g * length + start + i]);
                            if (pair == 2) write_narrow(of_weight[i - r], narrow, i * padded + p);
                        }
                        const int64_t at = r / pair * padded + p;
                        *(lanes *)(weights + at) = pair == 2 ? in_pairs(weight[0], weight[1]) : weight[0];
                        *(lanes *)(of_weights + at) = pair == 2 ? in_pairs(of_weight[0], of_weight[1]) : of_weight[0];
                    }
                product(weights, 1, padded, given_along, V, of_values, V, padded, steps, V, NULL, pair);
                product(of_weights, 1, padded, q_along, E, of_keys, E, padded, steps, E, NULL, pair);
                product(pair == 2 ? narrow : of_weights, padded / pair, 1, keys, E, of_q + (g * length + start) * E, E,
                        count, padded / pair, E, NULL, pair);
            }
        }
        write_rows(&s->of_k, d.row, d.begin + first, own, found, E, s->scale, of_keys);
        write_rows(&s->of_v, d.row, d.begin + first, own, found, V, 1.0f, of_values);
    }
    for (int64_t g = 0; g < group; g++)
        write_rows(&s->of_q, d.row, d.begin, own * group + g, length, E, s->scale, of_q + g * length * E);
}

void sequences_gradients(const Sequences *s) {
    const int64_t units = s->key_heads * s->parts, used = s->threads;
    const Document *documents = (const Document *)s->documents;
#pragma omp parallel for num_threads(used) schedule(dynamic)
    for (int64_t unit = 0; unit < s->count * units; unit++) {
        float *room = s->room + this_thread() * s->each;
        if (takes_pairs(s)) gradients_of(s, documents[unit / units], unit % units, room, 1 + PAIRS);
        else gradients_of(s, documents[unit / units], unit % units, room, 1);
    }
}
