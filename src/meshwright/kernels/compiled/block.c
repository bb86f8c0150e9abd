/* A whole block of a model. */

#include "rows.h"

/* What a block computes with: x + attention(norm(x)), then x + down(silu(gate) * up) of its norm. Queries, keys and
   values are one product, as are gate and up. `attention`: stores and sizes. q_norm and k_norm (E,) may be missing. */
typedef struct {
    Attention attention;
    Panels qkv, o, gate_up, down;
    const float *norm, *q_norm, *k_norm, *mlp_norm;
    float eps, qk_eps, mlp_eps;
} Block;

/* The rows of a step: cosine and sine (R, E / 2), slots (R,) where keys and values are kept, and as in Attention. */
typedef struct {
    const float *cosine, *sine;
    const int64_t *slots, *tables, *offsets, *last;
    int64_t rows, longest;
} Step;

/* A low-rank matrix beside a part of a product, for some rows of the step: those in `rows`, or from `begin` on. Its
   results begin at a `column` of the product. */
typedef struct {
    const Panels *a, *b;
    const int64_t *rows;
    int64_t begin, count, column;
} LowRank;

/* Of queries, keys and values; of o; of gate and up; of down. */
typedef struct {
    const LowRank *some[4];
    int64_t counts[4];
} LowRanks;

/* out (R, N) += (x A^T) B^T, x (R, D). */
static int64_t add_low_rank(const float *x, const LowRank *one, const Panels *part, float *out) {
    const int64_t width = part->width, rank = one->a->columns, wide = one->b->columns, count = one->count;
    float *narrow = malloc(count * (rank + wide + (one->rows ? width : 0)) * sizeof(float));
    if (!narrow) return 1;
    float *found = narrow + count * rank, *gathered = found + count * wide;
    for (int64_t row = 0; one->rows && row < count; row++)
        memcpy(gathered + row * width, x + one->rows[row] * width, width * sizeof(float));
    const float *from = one->rows ? gathered : x + one->begin * width;
    const int64_t failed = multiply(from, width, one->a, narrow, count) || multiply(narrow, rank, one->b, found, count);
    for (int64_t row = 0; row < count; row++) {
        float *to = out + (one->rows ? one->rows[row] : one->begin + row) * part->columns + one->column;
        for (int64_t i = 0; i < wide; i++) to[i] += found[row * wide + i];
    }
    free(narrow);
    return failed;
}

/* A part's product, and what is beside it. */
static int64_t multiply_part(const float *x, const Panels *part, const LowRanks *beside, int number, float *out,
                             int64_t rows) {
    int64_t failed = multiply(x, part->width, part, out, rows);
    for (int64_t i = 0; beside && i < beside->counts[number]; i++)
        failed = failed || add_low_rank(x, beside->some[number] + i, part, out);
    return failed;
}

/* x (R, D) through a block into out (R, D). `beside` may be missing. Returns 0, or 1 where there was no memory. */
int64_t block(const Block *b, const Step *s, const LowRanks *beside, const float *x, float *out) {
    Attention a = b->attention;
    const int64_t rows = s->rows, hidden = b->qkv.width, read = b->qkv.columns, ffn = b->down.width;
    const int64_t width = a.width, queries = a.heads * width, keys = a.key_heads * width;
    float *room = malloc(rows * (3 * hidden + read + queries + 3 * ffn) * sizeof(float));
    if (!room) return 1;
    float *normed = room, *found = normed + rows * hidden, *total = found + rows * hidden, *q = total + rows * hidden;
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
    failed = failed || attend(&a, s->longest) || multiply_part(attended, &b->o, beside, 1, found, rows);
    rms_norm(x, found, b->mlp_norm, b->mlp_eps, normed, total, rows, hidden);
    failed = failed || multiply_part(normed, &b->gate_up, beside, 2, gate, rows);
    swiglu(gate, 2 * ffn, gate + ffn, 2 * ffn, gated, rows, ffn);
    failed = failed || multiply_part(gated, &b->down, beside, 3, found, rows);
    for (int64_t i = 0; i < rows * hidden; i++) out[i] = total[i] + found[i];
    free(room);
    return failed;
}
