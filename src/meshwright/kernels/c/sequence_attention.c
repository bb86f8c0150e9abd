/* Attention of whole sequences and its gradients, tile by tile (Dao 2022, arXiv:2205.14135).

   No tile of weights is kept: the backward pass makes it again from the log-sum-exp of its queries. Letters: B rows of
   a batch, S positions, H query heads, K key heads, G = H / K, E width of keys and V of values, multiples of 16.

   Operands of products are words of 32 bits. A word is a number in fp32. Where `pair` is 2, it is two numbers in bf16 that
   follow each other in the sum of a product; the processor multiplies and adds both at once. Sums are in fp32. */

#include "vectors.h"

#define TILE 64 /* queries and keys of a tile; sequence_attention.py sizes the scratch memory by it */
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
    char *data;
    int64_t row, position, head, narrow;
} Strided;

/* documents (N, 3): row, first position, and the position behind the last. `keys`: number of keys of each row, where a row
   is one document over other keys than its own; 0 = keys are those of the document. Query i then sees the keys up to
   i + `past`, and there is no window. sums (B, H, S): log-sum-exp of the scores.
   `parts`: number of parts into which the query heads of a key head are cut; k_gradient and v_gradient have `parts`
   times K heads, which the caller adds up. `scratch`: `scratch_floats` words for each thread. `pairs`: 1 if products of
   bf16 may be those of pairs. */
typedef struct {
    Strided q, k, v, out, gradient, q_gradient, k_gradient, v_gradient;
    float *sums, *scratch;
    const int64_t *documents;
    int64_t count, length, keys, past, heads, key_heads, width, value_width, window, parts, threads, scratch_floats, pairs;
    float scale;
} Sequences;

static inline char *address_of(const Strided *x, int64_t row, int64_t position, int64_t head) {
    return x->data + (row * x->row + position * x->position + head * x->head) * (x->narrow ? 2 : 4);
}

static inline int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* Read `rows` rows of `width` numbers in fp32, and write 0 behind them up to `padded_rows` rows. */
static void read_rows(const Strided *x, int64_t row, int64_t position, int64_t head, int64_t rows, int64_t padded_rows,
                      int64_t width, float *to) {
    for (int64_t r = 0; r < rows; r++) {
        const char *row_data = address_of(x, row, position + r, head);
        for (int64_t i = 0; i < width; i += 16) *(lanes *)(to + r * width + i) = read_lanes(row_data, i, x->narrow);
    }
    memset(to + rows * width, 0, (padded_rows - rows) * width * sizeof(float));
}

/* Read rows as words. Where a word is one number, 16 bits are widened. */
static inline void read_words(const Strided *x, int64_t row, int64_t position, int64_t head, int64_t rows,
                              int64_t padded_rows,
                              int64_t width, float *to, const int pair) {
    if (pair == 1) {
        read_rows(x, row, position, head, rows, padded_rows, width, to);
        return;
    }
    char *words = (char *)to;
    for (int64_t r = 0; r < rows; r++) memcpy(words + r * width * 2, address_of(x, row, position + r, head), width * 2);
    memset(words + rows * width * 2, 0, (padded_rows - rows) * width * 2);
}

static void write_rows(const Strided *x, int64_t row, int64_t position, int64_t head, int64_t rows,
                       int64_t width, float scale, const float *from) {
    for (int64_t r = 0; r < rows; r++) {
        char *row_data = address_of(x, row, position + r, head);
        for (int64_t i = 0; i < width; i += 16)
            write_lanes(*(const lanes *)(from + r * width + i) * scale, row_data, i, x->narrow);
    }
}

#ifdef __clang__
#define SHUFFLED(A, B, ...) __builtin_shufflevector(A, B, __VA_ARGS__)
#else
#define SHUFFLED(A, B, ...) __builtin_shuffle(A, B, (whole_lanes){__VA_ARGS__})
#endif

/* Transpose (rows, columns), both multiples of 16, 16 by 16: exchange halves, then halves of halves. No lane is read
   alone, which would cost 256 loads for each square. */
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
/* Join the numbers of two rows that follow each other in a sum to words. */
static inline lanes interleave_bf16(lanes first, lanes second) {
    static const int16_t ORDER[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i packed = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (lanes)_mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER), packed);
}

static inline void write_bf16(lanes numbers, float *words, int64_t i) {
    _mm256_storeu_si256((__m256i *)((uint16_t *)words + i), (__m256i)_mm512_cvtneps_pbh((__m512)numbers));
}

static inline wide add_pair_products(wide total, bits a_pair, wide b_pairs) {
    return (wide)_mm512_dpbf16_ps((__m512)total, (__m512bh)_mm512_set1_epi32(a_pair), (__m512bh)b_pairs);
}
#else
static inline lanes interleave_bf16(lanes first, lanes second) { return first; }
static inline void write_bf16(lanes numbers, float *words, int64_t i) {}
static inline wide add_pair_products(wide total, bits a_pair, wide b_pairs) { return total; }
#endif

/* Join pairs of rows in bf16 (rows, width) to words (rows / 2, width). */
static void pair_rows(const float *from, int64_t rows, int64_t width, float *to) {
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t i = 0; i < width; i += 16) {
            const bit_lanes low = (bit_lanes)read_lanes(from, r * width + i, 1);
            const bit_lanes high = (bit_lanes)read_lanes(from, (r + 1) * width + i, 1);
            *(lanes *)(to + r / 2 * width + i) = (lanes)(low >> 16 | high);
        }
}

static inline __attribute__((always_inline)) void product_tile(const float *a, int64_t a_row, int64_t a_inner,
                                                          const float *b, int64_t b_row, float *c, int64_t c_row,
                                                          int64_t inner, const float *scale, const int pair,
                                                          const int rows, const int across) {
    wide total[DOWN][ACROSS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < across; p++) total[r][p] = scale ? (wide){0} : *(const wide *)(c + r * c_row + WIDE * p);
    for (int64_t i = 0; i < inner; i++) {
        wide b_vectors[ACROSS];
        for (int p = 0; p < across; p++) b_vectors[p] = *(const wide *)(b + i * b_row + WIDE * p);
        for (int r = 0; r < rows; r++) {
            const float *a_number = a + r * a_row + i * a_inner;
            for (int p = 0; p < across; p++)
                if (pair == 2) total[r][p] = add_pair_products(total[r][p], *(const bits *)a_number, b_vectors[p]);
                else total[r][p] += *a_number * b_vectors[p];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < across; p++) {
            if (scale) total[r][p] *= *scale;
            *(wide *)(c + r * c_row + WIDE * p) = total[r][p];
        }
}

/* Write `scale` times a (rows, inner) b (inner, columns) to c (rows, columns). Where `scale` is NULL, add it to c.
   Columns are a multiple of 16. Not inlined: a compiler that sees the scale fuses it with the next operation, and the
   forward and backward pass must round alike. */
static __attribute__((noinline)) void product(const float *a, int64_t a_row, int64_t a_inner, const float *b,
                                              int64_t b_row, float *c, int64_t c_row, int64_t rows, int64_t inner,
                                              int64_t columns, const float *scale, int pair) {
#define CASE(ROWS, VECTORS, PAIR)                                                                                       \
    case (PAIR * 8 + ROWS) * 8 + VECTORS:                                                                               \
        product_tile(a + r * a_row, a_row, a_inner, b + n, b_row, c + r * c_row + n, c_row, inner, scale, PAIR, ROWS,   \
                VECTORS);                                                                                               \
        break;
#if WIDE == 16
#define CASES(ROWS, PAIR) CASE(ROWS, 1, PAIR) CASE(ROWS, 2, PAIR) CASE(ROWS, 3, PAIR) CASE(ROWS, 4, PAIR)
#else
#define CASES(ROWS, PAIR) CASE(ROWS, ACROSS, PAIR)
#endif
#define ALL_CASES(PAIR) CASES(1, PAIR) CASES(4, PAIR) CASES(DOWN, PAIR)
    for (int64_t n = 0; n < columns; n += WIDE * ACROSS)
        for (int64_t r = 0, row_count; r < rows; r += row_count) {
            row_count = rows - r >= DOWN ? DOWN : rows - r >= 4 ? 4 : 1; /* every count is more code to compile */
            switch ((pair * 8 + row_count) * 8 + smaller_of((columns - n) / WIDE, ACROSS)) {
                ALL_CASES(1)
#if PAIRS
                ALL_CASES(2)
#endif
            }
        }
}

static const float UNSCALED = 1.0f;
static const lanes LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

typedef struct {
    int64_t row, begin, end;
} Document;

static inline int64_t count_tiles(Document d) { return (d.end - d.begin + TILE - 1) / TILE; }
static inline int64_t up_to_16(int64_t n) { return (n + 15) & ~15; }

/* Attend one tile of queries, for all query heads of one key head. Lanes are queries, so that no vector is summed up:
   maximum and sum of a query stay in its lane. */
static inline __attribute__((always_inline)) void attend_tile(const Sequences *s, Document d, int64_t start,
                                                              int64_t key_head,
                                                              float *scratch, const int pair) {
    const int64_t E = s->width, V = s->value_width, inner = E / pair, group = s->heads / s->key_heads;
    const int64_t end = smaller_of(start + TILE, d.end), query_count = end - start, padded = up_to_16(query_count),
        vectors = padded / 16, end_key = s->keys ? smaller_of(end + s->past, s->keys) : end;
    float *q = scratch, *keys = q + group * TILE * E, *values = keys + TILE * E, *weights = values + TILE * V;
    float *out = weights + TILE * TILE, *rows_read = out + group * TILE * V;
    lanes peak[group][4], total[group][4];
    for (int64_t g = 0; g < group; g++) {
        read_words(&s->q, d.row, start, key_head * group + g, query_count, padded, E, rows_read, pair);
        transpose(rows_read, inner, padded, inner, q + g * TILE * E, padded);
        memset(out + g * TILE * V, 0, padded * V * sizeof(float));
        for (int64_t p = 0; p < 4; p++) peak[g][p] = (lanes){0} - INFINITY, total[g][p] = (lanes){0};
    }
    const int64_t first_visible = s->window ? larger_of(d.begin, start - s->window + 1) : d.begin;
    for (int64_t first_key = d.begin + (first_visible - d.begin) / TILE * TILE; first_key < end_key;
         first_key += TILE) {
        const int64_t key_count = smaller_of(first_key + TILE, end_key) - first_key;
        const int64_t steps = (key_count + pair - 1) / pair;
        read_words(&s->k, d.row, first_key, key_head, key_count, key_count, E, keys, pair);
        read_words(&s->v, d.row, first_key, key_head, key_count, steps * pair, V, pair == 2 ? rows_read : values, pair);
        if (pair == 2) pair_rows(rows_read, steps * 2, V, values);
        const int all_visible = first_key + TILE <= start + s->past + 1 && (!s->window || first_key > end - 1 - s->window);
        for (int64_t g = 0; g < group; g++) {
            product(keys, inner, 1, q + g * TILE * E, padded, weights, padded, key_count, inner, padded, &s->scale,
                    pair);
            for (int64_t p = 0; p < vectors; p++) {
                float *scores = weights + 16 * p;
                lanes largest = peak[g][p];
                /* relative to the first key: fp32 holds every position of a tile, but not every position of a text */
                const lanes query = LANE_NUMBERS + (float)(start + s->past + 16 * p - first_key);
                if (!all_visible)
                    for (int64_t t = 0; t < key_count; t++) {
                        lanes *x = (lanes *)(scores + t * padded);
                        const lanes key = (lanes){0} + (float)t;
                        const whole_lanes hidden = s->window
                            ? (key > query) | (key <= query - (float)s->window) : key > query;
                        *x = select_lanes(hidden, (lanes){0} - INFINITY, *x);
                    }
                for (int64_t t = 0; t < key_count; t++) largest = larger(largest,
                                                                         *(const lanes *)(scores + t * padded));
                const lanes zero = {0}, base = select_lanes(largest == zero - INFINITY, zero, largest);
                const lanes rescale = exponentials(peak[g][p] - base);
                lanes sum = total[g][p] * rescale;
                for (int64_t t = 0; t < key_count; t += pair) {
                    lanes weight[2] = {{0}, {0}};
                    for (int64_t i = 0; i < smaller_of(pair, key_count - t); i++) {
                        const lanes x = *(const lanes *)(scores + (t + i) * padded);
                        weight[i] = exponentials(x - base);
                        if (!all_visible) weight[i] = select_lanes(x == zero - INFINITY, zero, weight[i]);
                        sum += weight[i];
                    }
                    *(lanes *)(scores + t / pair * padded) =
                        pair == 2 ? interleave_bf16(weight[0], weight[1]) : weight[0];
                }
                total[g][p] = sum;
                peak[g][p] = largest;
                for (int64_t e = 0; e < V; e++) {
                    lanes *x = (lanes *)(out + g * TILE * V + e * padded + 16 * p);
                    *x = *x * rescale;
                }
            }
            product(values, 1, V, weights, padded, out + g * TILE * V, padded, V, steps, padded, NULL, pair);
        }
    }
    for (int64_t g = 0; g < group; g++) {
        const int64_t head = key_head * group + g;
        float *sums = s->sums + (d.row * s->heads + head) * s->length + start, *tile_out = out + g * TILE * V;
        for (int64_t p = 0; p < vectors; p++) {
            const lanes inverse_sum = 1.0f / total[g][p];
            for (int64_t e = 0; e < V; e++) {
                lanes *x = (lanes *)(tile_out + e * padded + 16 * p);
                *x = *x * inverse_sum;
            }
            for (int64_t i = 0; i < smaller_of(16, query_count - 16 * p); i++)
                sums[16 * p + i] = peak[g][p][i] + logf(total[g][p][i]);
        }
        transpose(tile_out, padded, V, padded, rows_read, V);
        write_rows(&s->out, d.row, start, head, query_count, V, 1.0f, rows_read);
    }
}

/* Return 1 if the processor multiplies pairs and both widths are whole vectors of words. */
static int takes_pairs(const Sequences *s) {
    return PAIRS && s->pairs && s->q.narrow && s->gradient.narrow && s->width % 32 == 0 && s->value_width % 32 == 0;
}

/* Attend all documents. Tiles at the ends of documents come first: they have most keys, and a long one that starts last
   would keep the other threads waiting. Returns 0, or 1 where there was no memory. */
int64_t attend_sequences(const Sequences *s) {
    int64_t *tiles_before = malloc((s->count + 1) * sizeof(int64_t)); /* sums over the documents before */
    if (!tiles_before) return 1;
    const Document *documents = (const Document *)s->documents;
    tiles_before[0] = 0;
    for (int64_t n = 0; n < s->count; n++) tiles_before[n + 1] = tiles_before[n] + count_tiles(documents[n]);
    const int64_t tiles = tiles_before[s->count], thread_count = s->threads;
#pragma omp parallel for num_threads(thread_count) schedule(dynamic)
    for (int64_t unit = 0; unit < tiles * s->key_heads; unit++) {
        const int64_t tile = tiles - 1 - unit / s->key_heads;
        int64_t low = 0, high = s->count;
        while (high - low > 1) *(tiles_before[(low + high) / 2] <= tile ? &low : &high) = (low + high) / 2;
        const int64_t start = documents[low].begin + (tile - tiles_before[low]) * TILE;
        float *scratch = s->scratch + thread_number() * s->scratch_floats;
        if (takes_pairs(s)) attend_tile(s, documents[low], start, unit % s->key_heads, scratch, 1 + PAIRS);
        else attend_tile(s, documents[low], start, unit % s->key_heads, scratch, 1);
    }
    free(tiles_before);
    return 0;
}

/* Write the gradients of one document, for one key head and one part of its query heads. Lanes are keys. Scores are
   computed again with the bits that `sums` was made of, same scale and order: in scores of 1e10 the last bit would
   change a weight by a factor of e^1000. `deltas`: sum of gradient times output for each query. */
static inline __attribute__((always_inline)) void document_gradients(const Sequences *s, Document d,
                                                                     int64_t head_part, float *scratch,
                                                               const int pair) {
    const int64_t E = s->width, V = s->value_width, group = s->heads / s->key_heads / s->parts;
    const int64_t key_head = head_part / s->parts, length = d.end - d.begin, key_length = s->keys ? s->keys : length;
    float *keys = scratch, *keys_transposed = keys + TILE * E, *values = keys_transposed + TILE * E;
    float *values_transposed = values + TILE * V, *q = values_transposed + TILE * V, *gradient = q + TILE * E;
    float *weights = gradient + TILE * V, *score_gradients = weights + TILE * TILE,
        *key_gradients = score_gradients + TILE * TILE;
    float *value_gradients = key_gradients + TILE * E, *narrow_gradients = value_gradients + TILE * V,
        *deltas = narrow_gradients + TILE * TILE / 2;
    float *q_gradients = deltas + group * length;
    float *q_operand = pair == 2 ? q + TILE * E / 2 : q, *gradient_operand = pair == 2
        ? gradient + TILE * V / 2 : gradient;
    float *key_rows = pair == 2 ? q : keys, *value_rows = pair == 2 ? gradient : values;
    for (int64_t g = 0; g < group; g++)
        for (int64_t start = 0; start < length; start += TILE) {
            const int64_t query_count = smaller_of(TILE, length - start), head = head_part * group + g;
            read_rows(&s->gradient, d.row, d.begin + start, head, query_count, query_count, V, gradient);
            read_rows(&s->out, d.row, d.begin + start, head, query_count, query_count, V, values);
            for (int64_t r = 0; r < query_count; r++) {
                lanes sum = {0};
                for (int64_t i = 0; i < V; i += 16)
                    sum += *(const lanes *)(gradient + r * V + i) * *(const lanes *)(values + r * V + i);
                deltas[g * length + start + r] = sum_lanes(sum);
            }
        }
    memset(q_gradients, 0, group * length * E * sizeof(float));
    for (int64_t first_key = 0; first_key < key_length; first_key += TILE) {
        const int64_t key_count = smaller_of(TILE, key_length - first_key), padded = up_to_16(key_count);
        read_words(&s->k, d.row, d.begin + first_key, key_head, key_count, padded, E, key_rows, pair);
        read_words(&s->v, d.row, d.begin + first_key, key_head, key_count, padded, V, value_rows, pair);
        transpose(key_rows, E / pair, padded, E / pair, keys_transposed, padded);
        transpose(value_rows, V / pair, padded, V / pair, values_transposed, padded);
        if (pair == 2) pair_rows(key_rows, padded, E, keys);
        memset(key_gradients, 0, padded * E * sizeof(float));
        memset(value_gradients, 0, padded * V * sizeof(float));
        const int64_t end_query = s->window ? smaller_of(length, first_key + key_count - 1 + s->window) : length;
        for (int64_t g = 0; g < group; g++) {
            const int64_t head = head_part * group + g;
            const float *sums = s->sums + (d.row * s->heads + head) * s->length + d.begin;
            const int64_t first_query = larger_of(0, first_key - s->past) / TILE * TILE;
            for (int64_t start = first_query; start < end_query; start += TILE) {
                const int64_t query_count = smaller_of(TILE, length - start);
                const int64_t steps = (query_count + pair - 1) / pair;
                read_words(&s->q, d.row, d.begin + start, head, query_count, steps * pair, E, q, pair);
                read_words(&s->gradient, d.row, d.begin + start, head, query_count, steps * pair, V, gradient, pair);
                if (pair == 2) pair_rows(q, steps * 2, E, q_operand), pair_rows(gradient, steps * 2, V,
                                                                                gradient_operand);
                product(q, E / pair, 1, keys_transposed, padded, weights, padded, query_count, E / pair, padded,
                        &s->scale, pair);
                product(gradient, V / pair, 1, values_transposed, padded, score_gradients, padded, query_count,
                        V / pair, padded, &UNSCALED, pair);
                const int all_visible = start + s->past + 1 >= first_key + TILE && key_count == TILE &&
                                        (!s->window || first_key > start + query_count - 1 - s->window);
                for (int64_t r = 0; r < query_count; r += pair)
                    for (int64_t p = 0; p < padded; p += 16) {
                        lanes weight[2] = {{0}, {0}}, score_gradient[2] = {{0}, {0}};
                        for (int64_t i = r; i < smaller_of(query_count, r + pair); i++) {
                            const lanes x = *(const lanes *)(weights + i * padded + p);
                            lanes probability = exponentials(x - sums[start + i]);
                            if (!all_visible) {
                                const lanes key = LANE_NUMBERS + (float)(first_key + p),
                                    query = (lanes){0} + (float)smaller_of(start + s->past + i, key_length - 1);
                                const whole_lanes hidden =
                                    s->window ? (key > query) | (key <= query - (float)s->window) : key > query;
                                probability = select_lanes(hidden, (lanes){0}, probability);
                            }
                            const lanes probability_gradient = *(const lanes *)(score_gradients + i * padded + p);
                            weight[i - r] = probability;
                            const float delta = deltas[g * length + start + i];
                            score_gradient[i - r] = probability * (probability_gradient - delta);
                            if (pair == 2) write_bf16(score_gradient[i - r], narrow_gradients, i * padded + p);
                        }
                        const int64_t word = r / pair * padded + p;
                        *(lanes *)(weights + word) = pair == 2 ? interleave_bf16(weight[0], weight[1]) : weight[0];
                        *(lanes *)(score_gradients + word) =
                            pair == 2 ? interleave_bf16(score_gradient[0], score_gradient[1]) : score_gradient[0];
                    }
                product(weights, 1, padded, gradient_operand, V, value_gradients, V, padded, steps, V, NULL, pair);
                product(score_gradients, 1, padded, q_operand, E, key_gradients, E, padded, steps, E, NULL, pair);
                product(pair == 2 ? narrow_gradients : score_gradients, padded / pair, 1, keys, E,
                        q_gradients + (g * length + start) * E, E, query_count, padded / pair, E, NULL, pair);
            }
        }
        write_rows(&s->k_gradient, d.row, d.begin + first_key, head_part, key_count, E, s->scale, key_gradients);
        write_rows(&s->v_gradient, d.row, d.begin + first_key, head_part, key_count, V, 1.0f, value_gradients);
    }
    for (int64_t g = 0; g < group; g++)
        write_rows(&s->q_gradient, d.row, d.begin, head_part * group + g, length, E, s->scale,
                   q_gradients + g * length * E);
}

void sequences_gradients(const Sequences *s) {
    const int64_t units = s->key_heads * s->parts, thread_count = s->threads;
    const Document *documents = (const Document *)s->documents;
#pragma omp parallel for num_threads(thread_count) schedule(dynamic)
    for (int64_t unit = 0; unit < s->count * units; unit++) {
        float *scratch = s->scratch + thread_number() * s->scratch_floats;
        if (takes_pairs(s)) document_gradients(s, documents[unit / units], unit % units, scratch, 1 + PAIRS);
        else document_gradients(s, documents[unit / units], unit % units, scratch, 1);
    }
}
