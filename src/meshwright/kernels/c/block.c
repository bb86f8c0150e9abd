/* A whole transformer block in one call. */

#include "rows.h"

/* Weights of a block: x + attention(norm(x)), then x + down(silu(gate) * up) of its norm. Queries, keys and values are
   one product, as are gate and up. `attention`: stores and sizes. q_norm and k_norm (E,) may be NULL. */
typedef struct {
    Attention attention;
    Panels qkv, o, gate_up, down;
    const float *norm, *q_norm, *k_norm, *mlp_norm;
    float eps, qk_eps, mlp_eps;
} Block;

/* Rows of a step: cosine and sine (R, E / 2), slots (R,) for keys and values; the rest as in Attention. */
typedef struct {
    const float *cosine, *sine;
    const int64_t *slots, *tables, *offsets, *last;
    int64_t rows, longest;
} Step;

/* A low-rank matrix beside a part of a product, for the rows of the step in `rows`, or from `begin` on. Its results
   start at a `column` of the product. */
typedef struct {
    const Panels *a, *b;
    const int64_t *rows;
    int64_t begin, count, column;
} LowRank;

/* Adapters of four products: queries, keys and values; o; gate and up; down. */
typedef struct {
    const LowRank *adapters[4];
    int64_t counts[4];
} LowRanks;

/* Add (x A^T) B^T to out (R, N), with x (R, D). */
static int64_t add_low_rank(const float *x, const LowRank *adapter, const Panels *part, float *out) {
    const int64_t width = part->width, rank = adapter->a->columns, wide = adapter->b->columns, count = adapter->count;
    float *narrow = malloc(count * (rank + wide + (adapter->rows ? width : 0)) * sizeof(float));
    if (!narrow) return 1;
    float *added = narrow + count * rank, *gathered = added + count * wide;
    for (int64_t row = 0; adapter->rows && row < count; row++)
        memcpy(gathered + row * width, x + adapter->rows[row] * width, width * sizeof(float));
    const float *from = adapter->rows ? gathered : x + adapter->begin * width;
    const int64_t failed = multiply(from, width, adapter->a, narrow, count) || multiply(narrow, rank, adapter->b, added, count);
    for (int64_t row = 0; row < count; row++) {
        float *to = out + (adapter->rows ? adapter->rows[row] : adapter->begin + row) * part->columns + adapter->column;
        for (int64_t i = 0; i < wide; i++) to[i] += added[row * wide + i];
    }
    free(narrow);
    return failed;
}

/* Multiply by a part, and add its adapters. */
static int64_t multiply_part(const float *x, const Panels *part, const LowRanks *beside, int number, float *out,
                             int64_t rows) {
    int64_t failed = multiply(x, part->width, part, out, rows);
    for (int64_t i = 0; beside && i < beside->counts[number]; i++)
        failed = failed || add_low_rank(x, beside->adapters[number] + i, part, out);
    return failed;
}

/* Run x (R, D) through a block into out (R, D). `beside` may be NULL. Returns 0, or 1 without memory. */
int64_t block(const Block *b, const Step *s, const LowRanks *beside, const float *x, float *out) {
    Attention a = b->attention;
    const int64_t rows = s->rows, hidden = b->qkv.width, read = b->qkv.columns, ffn = b->down.width;
    const int64_t width = a.width, queries = a.heads * width, keys = a.key_heads * width;
    float *room = malloc(rows * (3 * hidden + read + queries + 3 * ffn) * sizeof(float));
    if (!room) return 1;
    float *normed = room, *product = normed + rows * hidden, *total = product + rows * hidden, *q = total + rows * hidden;
    float *attended = q + rows * read, *gate = attended + rows * queries, *gated = gate + rows * 2 * ffn;
    float *k = q + queries, *v = k + keys;

    rms_norm(x, NULL, b->norm, b->eps, normed, NULL, rows, hidden);
    int64_t failed = multiply_part(normed, &b->qkv, beside, 0, q, rows);
    for (int64_t row = 0; b->q_norm && row < rows; row++) {
        rms_norm(q + row * read, NULL, b->q_norm, b->qk_eps, q + row * read, NULL, a.heads, width);
        rms_norm(k + row * read, NULL, b->k_norm, b->qk_eps, k + row * read, NULL, a.key_heads, width);
    }
    rotate(q, read, width, s->cosine, s->sine, q, read, width, rows, a.heads + a.key_heads, width / 2);
    if (a.key_scales) {
        keep_int8(k, read, width, s->slots, (int8_t *)a.keys, (float *)a.key_scales, rows, a.key_heads, width);
        keep_int8(v, read, width, s->slots, (int8_t *)a.values, (float *)a.value_scales, rows, a.key_heads, width);
    } else {
        keep_floats(k, read, width, s->slots, (float *)a.keys, rows, a.key_heads, width);
        keep_floats(v, read, width, s->slots, (float *)a.values, rows, a.key_heads, width);
    }
    a.q = q, a.q_row = read, a.out = attended, a.rows = rows;
    a.tables = s->tables, a.offsets = s->offsets, a.last = s->last;
    failed = failed || attend(&a, s->longest) || multiply_part(attended, &b->o, beside, 1, product, rows);
    rms_norm(x, product, b->mlp_norm, b->mlp_eps, normed, total, rows, hidden);
    failed = failed || multiply_part(normed, &b->gate_up, beside, 2, gate, rows);
    swiglu(gate, 2 * ffn, gate + ffn, 2 * ffn, gated, rows, ffn);
    failed = failed || multiply_part(gated, &b->down, beside, 3, product, rows);
    for (int64_t i = 0; i < rows * hidden; i++) out[i] = total[i] + product[i];
    free(room);
    return failed;
}
