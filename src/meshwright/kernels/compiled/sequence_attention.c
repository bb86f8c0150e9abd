/* Attention of whole sequences and its gradients, tile by tile (Dao 2022, arXiv:2205.14135).

   No tile of weights is kept: the backward pass makes it again from the log-sum-exp of its queries. Letters: B rows of
   a batch, S positions, H query heads, K key heads, G = H / K, E width of keys and V of values, multiples of 16. */

#include "vectors.h"

#define TILE 64 /* queries and keys of a tile */
#define DOWN 6 /* rows, and vectors of WIDE numbers, of which the sums stay in registers */
#ifdef __AVX512F__
#define WIDE 16
#define ACROSS 4
#elif defined(__AVX__)
#define WIDE 8 /* gcc keeps vectors that are wider than a register in memory */
#define ACROSS 2
#else
#define WIDE 4
#define ACROSS 4
#endif

/* A tensor (B, S, heads, width), fp32 or, where it is narrow, bf16, by its strides. */
typedef struct {
    char *at;
    int64_t row, position, head, narrow;
} Strided;

/* documents (N, 3): a row, the position where one begins, and the one behind its end. sums, the log-sum-exp: (B, H, S).
   `parts`: in how many parts the query heads of a key head are taken; of_k and of_v have so many times K heads. room:
   for `each` numbers of each thread. */
typedef struct {
    Strided q, k, v, out, gradient, of_q, of_k, of_v;
    float *sums, *room;
    const int64_t *documents;
    int64_t count, length, heads, key_heads, width, value_width, window, parts, threads, each;
    float scale;
} Sequences;

static inline char *part_of(const Strided *x, int64_t row, int64_t position, int64_t head) {
    return x->at + (row * x->row + position * x->position + head * x->head) * (x->narrow ? 2 : 4);
}

static inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most_of(int64_t a, int64_t b) { return a > b ? a : b; }

/* `rows` rows of 16 `vectors` numbers, and 0 behind them up to `all` rows. */
static void read_rows(const Strided *x, int64_t row, int64_t position, int64_t head, int64_t rows,
                      int64_t all, int64_t width, float scale, float *to) {
    for (int64_t r = 0; r < rows; r++) {
        const char *from = part_of(x, row, position + r, head);
        for (int64_t i = 0; i < width; i += 16) *(lanes *)(to + r * width + i) = read_lanes(from, i, x->narrow) * scale;
    }
    memset(to + rows * width, 0, (all - rows) * width * sizeof(float));
}

static void write_rows(const Strided *x, int64_t row, int64_t position, int64_t head, int64_t rows,
                       int64_t width, float scale, const float *from) {
    for (int64_t r = 0; r < rows; r++) {
        char *to = part_of(x, row, position + r, head);
        for (int64_t i = 0; i < width; i += 16)
            write_lanes(*(const lanes *)(from + r * width + i) * scale, to, i, x->narrow);
    }
}

typedef float wide __attribute__((vector_size(4 * WIDE), aligned(4), may_alias));

static inline __attribute__((always_inline)) void sums_of(const float *a, int64_t a_row, int64_t a_inner,
                                                          const float *b, int64_t b_row, float *c, int64_t c_row,
                                                          int64_t inner, int adds, const int rows, const int across) {
    wide total[DOWN][ACROSS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < across; p++) total[r][p] = adds ? *(const wide *)(c + r * c_row + WIDE * p) : (wide){0};
    for (int64_t i = 0; i < inner; i++) {
        wide right[ACROSS];
        for (int p = 0; p < across; p++) right[p] = *(const wide *)(b + i * b_row + WIDE * p);
        for (int r = 0; r < rows; r++) {
            const float left = a[r * a_row + i * a_inner];
            for (int p = 0; p < across; p++) total[r][p] += left * right[p];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < across; p++) *(wide *)(c + r * c_row + WIDE * p) = total[r][p];
}

/* c (rows, columns) = or += a (rows, inner) b (inner, columns); columns are a multiple of 16. */
static void product(const float *a, int64_t a_row, int64_t a_inner, const float *b, int64_t b_row, float *c,
                    int64_t c_row, int64_t rows, int64_t inner, int64_t columns, int adds) {
#define SOME_ROWS(ROWS, VECTORS)                                                                                        \
    case ROWS * 8 + VECTORS:                                                                                            \
        sums_of(a + r * a_row, a_row, a_inner, b + n, b_row, c + r * c_row + n, c_row, inner, adds, ROWS, VECTORS);     \
        break;
#if WIDE == 16
#define SOME(ROWS) SOME_ROWS(ROWS, 1) SOME_ROWS(ROWS, 2) SOME_ROWS(ROWS, 3) SOME_ROWS(ROWS, 4)
#else
#define SOME(ROWS) SOME_ROWS(ROWS, ACROSS)
#endif
#define EACH_SIZE SOME(1) SOME(2) SOME(3) SOME(4) SOME(5) SOME(6)
    for (int64_t n = 0; n < columns; n += WIDE * ACROSS)
        for (int64_t r = 0; r < rows; r += DOWN)
            switch (least_of(rows - r, DOWN) * 8 + least_of((columns - n) / WIDE, ACROSS)) { EACH_SIZE }
}

static const lanes COUNT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

typedef struct {
    int64_t row, begin, end;
} Document;

static inline int64_t tiles_of(Document d) { return (d.end - d.begin + TILE - 1) / TILE; }
static inline int64_t up_to_16(int64_t n) { return (n + 15) & ~15; }

/* One tile of queries of all query heads of one key head. Lanes are queries, so that no vector is summed up. */
static void attend_tile(const Sequences *s, Document d, int64_t start, int64_t own, float *room) {
    const int64_t E = s->width, V = s->value_width, group = s->heads / s->key_heads, stop = least_of(start + TILE, d.end);
    const int64_t count = stop - start, padded = up_to_16(count), vectors = padded / 16;
    float *q = room, *keys = q + group * TILE * E, *values = keys + TILE * E, *weights = values + TILE * V;
    float *out = weights + TILE * TILE, *rows = out + group * TILE * V;
    lanes most[group][4], total[group][4];
    for (int64_t g = 0; g < group; g++) {
        read_rows(&s->q, d.row, start, own * group + g, count, padded, E, s->scale, rows);
        transpose(rows, E, padded, E, q + g * TILE * E, padded);
        memset(out + g * TILE * V, 0, padded * V * sizeof(float));
        for (int64_t p = 0; p < 4; p++) most[g][p] = (lanes){0} - INFINITY, total[g][p] = (lanes){0};
    }
    const int64_t seen = s->window ? most_of(d.begin, start - s->window + 1) : d.begin;
    for (int64_t first = d.begin + (seen - d.begin) / TILE * TILE; first < stop; first += TILE) {
        const int64_t found = least_of(first + TILE, stop) - first;
        read_rows(&s->k, d.row, first, own, found, found, E, 1.0f, keys);
        read_rows(&s->v, d.row, first, own, found, found, V, 1.0f, values);
        const int whole = first + TILE <= start + 1 && (!s->window || first > stop - 1 - s->window);
        for (int64_t g = 0; g < group; g++) {
            product(keys, E, 1, q + g * TILE * E, padded, weights, padded, found, E, padded, 0);
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
                for (int64_t t = 0; t < found; t++) {
                    const lanes x = *(const lanes *)(at + t * padded);
                    largest = either(largest > x, largest, x);
                }
                const lanes none = {0}, base = either(largest == none - INFINITY, none, largest);
                const lanes again = exponentials(most[g][p] - base);
                lanes sum = total[g][p] * again;
                for (int64_t t = 0; t < found; t++) {
                    lanes *x = (lanes *)(at + t * padded);
                    const lanes weight = exponentials(*x - base);
                    *x = whole ? weight : either(*x == none - INFINITY, none, weight);
                    sum += *x;
                }
                total[g][p] = sum;
                most[g][p] = largest;
                for (int64_t e = 0; e < V; e++) {
                    lanes *x = (lanes *)(out + g * TILE * V + e * padded + 16 * p);
                    *x = *x * again;
                }
            }
            product(values, 1, V, weights, padded, out + g * TILE * V, padded, V, found, padded, 1);
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
        attend_tile(s, documents[low], start, unit % s->key_heads, s->room + this_thread() * s->each);
    }
    free(before);
    return 0;
}

/* One document of one key head and one part of its query heads. Lanes are keys. Scores have the bits that `sums` was
   made of, scale and order alike: of scores of 1e10 a last bit is a factor of e^1000 to a weight. */
static void gradients_of(const Sequences *s, Document d, int64_t own, float *room) {
    const int64_t E = s->width, V = s->value_width, group = s->heads / s->key_heads / s->parts;
    const int64_t key_head = own / s->parts, length = d.end - d.begin;
    float *keys = room, *keys_turned = keys + TILE * E, *values = keys_turned + TILE * E;
    float *values_turned = values + TILE * V, *q = values_turned + TILE * V, *given = q + TILE * E;
    float *weights = given + TILE * V, *of_weights = weights + TILE * TILE, *of_keys = of_weights + TILE * TILE;
    float *of_values = of_keys + TILE * E, *means = of_values + TILE * V, *of_q = means + group * length;
    for (int64_t g = 0; g < group; g++)
        for (int64_t start = 0; start < length; start += TILE) {
            const int64_t count = least_of(TILE, length - start), head = own * group + g;
            read_rows(&s->gradient, d.row, d.begin + start, head, count, count, V, 1.0f, given);
            read_rows(&s->out, d.row, d.begin + start, head, count, count, V, 1.0f, values);
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
        read_rows(&s->k, d.row, d.begin + first, key_head, found, padded, E, 1.0f, keys);
        read_rows(&s->v, d.row, d.begin + first, key_head, found, padded, V, 1.0f, values);
        transpose(keys, E, padded, E, keys_turned, padded);
        transpose(values, V, padded, V, values_turned, padded);
        memset(of_keys, 0, padded * E * sizeof(float));
        memset(of_values, 0, padded * V * sizeof(float));
        const int64_t end = s->window ? least_of(length, first + found - 1 + s->window) : length;
        for (int64_t g = 0; g < group; g++) {
            const int64_t head = own * group + g;
            const float *sums = s->sums + (d.row * s->heads + head) * s->length + d.begin;
            for (int64_t start = first; start < end; start += TILE) {
                const int64_t count = least_of(TILE, length - start);
                read_rows(&s->q, d.row, d.begin + start, head, count, count, E, s->scale, q);
                read_rows(&s->gradient, d.row, d.begin + start, head, count, count, V, 1.0f, given);
                product(q, E, 1, keys_turned, padded, weights, padded, count, E, padded, 0);
                product(given, V, 1, values_turned, padded, of_weights, padded, count, V, padded, 0);
                const int whole = start > first && found == TILE && (!s->window || first > start + count - 1 - s->window);
                for (int64_t r = 0; r < count; r++) {
                    const float sum = sums[start + r], mean = means[g * length + start + r];
                    for (int64_t p = 0; p < padded; p += 16) {
                        lanes *x = (lanes *)(weights + r * padded + p), *of_x = (lanes *)(of_weights + r * padded + p);
                        lanes weight = exponentials(*x - sum);
                        if (!whole) {
                            const lanes key = COUNT + (float)(first + p), query = (lanes){0} + (float)(start + r);
                            const whole_lanes hidden =
                                s->window ? (key > query) | (key <= query - (float)s->window) : key > query;
                            weight = either(hidden, (lanes){0}, weight);
                        }
                        *x = weight;
                        *of_x = weight * (*of_x - mean);
                    }
                }
                product(weights, 1, padded, given, V, of_values, V, padded, count, V, 1);
                product(of_weights, 1, padded, q, E, of_keys, E, padded, count, E, 1);
                product(of_weights, padded, 1, keys, E, of_q + (g * length + start) * E, E, count, padded, E, 1);
            }
        }
        write_rows(&s->of_k, d.row, d.begin + first, own, found, E, 1.0f, of_keys);
        write_rows(&s->of_v, d.row, d.begin + first, own, found, V, 1.0f, of_values);
    }
    for (int64_t g = 0; g < group; g++)
        write_rows(&s->of_q, d.row, d.begin, own * group + g, length, E, s->scale, of_q + g * length * E);
}

void sequences_gradients(const Sequences *s) {
    const int64_t units = s->key_heads * s->parts, used = s->threads;
    const Document *documents = (const Document *)s->documents;
#pragma omp parallel for num_threads(used) schedule(dynamic)
    for (int64_t unit = 0; unit < s->count * units; unit++)
        gradients_of(s, documents[unit / units], unit % units, s->room + this_thread() * s->each);
}
