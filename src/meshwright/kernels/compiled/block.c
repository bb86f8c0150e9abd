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

/* x (R, D) through a block into out (R, D). Returns 0, or 1 where there was no memory. */
int64_t block(const Block *b, const Step *s, const float *x, float *out) {
    Attention a = b->attention;
    const int64_t rows = s->rows, hidden = b->qkv.width, read = b->qkv.columns, ffn = b->down.width;
    const int64_t width = a.width, queries = a.heads * width, keys = a.key_heads * width;
    float *room = malloc(rows * (3 * hidden + read + queries + 3 * ffn) * sizeof(float));
    if (!room) return 1;
    float *normed = room, *found = normed + rows * hidden, *total = found + rows * hidden, *q = total + rows * hidden;
    float *attended = q + rows * read, *gate = attended + rows * queries, *gated = gate + rows * 2 * ffn;
    float *k = q + queries, *v = k + keys;

    rms_norm(x, NULL, b->norm, b->eps, normed, NULL, rows, hidden);
    int64_t failed = multiply(normed, hidden, &b->qkv, q, rows);
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
    failed = failed || attend(&a, s->longest) || multiply(attended, queries, &b->o, found, rows);
    rms_norm(x, found, b->mlp_norm, b->mlp_eps, normed, total, rows, hidden);
    failed = failed || multiply(normed, hidden, &b->gate_up, gate, rows);
    swiglu(gate, 2 * ffn, gate + ffn, 2 * ffn, gated, rows, ffn);
    failed = failed || multiply(gated, ffn, &b->down, found, rows);
    for (int64_t i = 0; i < rows * hidden; i++) out[i] = total[i] + found[i];
    free(room);
    return failed;
}
