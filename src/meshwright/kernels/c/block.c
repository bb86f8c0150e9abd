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

/* A low-rank matrix beside a part of a product, for the rows of the step in `rows`, or from `begin` on. Its products
   are added from a `column` of the product on. */
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
    const int64_t width = part->width, rank = adapter->a->columns, part_columns = adapter->b->columns,
        count = adapter->count;
    float *reduced = malloc(count * (rank + part_columns + (adapter->rows ? width : 0)) * sizeof(float));
    if (!reduced) return 1;
    float *added = reduced + count * rank, *gathered = added + count * part_columns;
    for (int64_t row = 0; adapter->rows && row < count; row++)
        memcpy(gathered + row * width, x + adapter->rows[row] * width, width * sizeof(float));
    const float *inputs = adapter->rows ? gathered : x + adapter->begin * width;
    const int64_t failed = multiply(inputs, width, adapter->a, reduced, count) || multiply(reduced, rank, adapter->b,
                                                                                           added, count);
    for (int64_t row = 0; row < count; row++) {
        float *row_out = out + (adapter->rows
                                ? adapter->rows[row] : adapter->begin + row) * part->columns + adapter->column;
        for (int64_t i = 0; i < part_columns; i++) row_out[i] += added[row * part_columns + i];
    }
    free(reduced);
    return failed;
}

/* Multiply by a part, and add its adapters. */
static int64_t multiply_part(const float *x, const Panels *part, const LowRanks *adapters, int product_number,
                             float *out,
                             int64_t rows) {
    int64_t failed = multiply(x, part->width, part, out, rows);
    for (int64_t i = 0; adapters && i < adapters->counts[product_number]; i++)
        failed = failed || add_low_rank(x, adapters->adapters[product_number] + i, part, out);
    return failed;
}

/* Run x (R, D) through a block into out (R, D). `adapters` may be NULL. Returns 0, or 1 without memory. */
int64_t block(const Block *weights, const Step *step, const LowRanks *adapters, const float *x, float *out) {
    Attention attention = weights->attention;
    const int64_t rows = step->rows, hidden = weights->qkv.width, qkv_width = weights->qkv.columns,
        ffn = weights->down.width;
    const int64_t width = attention.width, queries = attention.heads * width, keys = attention.key_heads * width;
    float *scratch = malloc(rows * (3 * hidden + qkv_width + queries + 3 * ffn) * sizeof(float));
    if (!scratch) return 1;
    float *normed = scratch, *product = normed + rows * hidden, *total = product + rows * hidden,
        *q = total + rows * hidden;
    float *attended = q + rows * qkv_width, *gate = attended + rows * queries, *gated = gate + rows * 2 * ffn;
    float *k = q + queries, *v = k + keys;

    rms_norm(x, NULL, weights->norm, weights->eps, normed, NULL, rows, hidden);
    int64_t failed = multiply_part(normed, &weights->qkv, adapters, 0, q, rows);
    for (int64_t row = 0; weights->q_norm && row < rows; row++) {
        rms_norm(q + row * qkv_width, NULL, weights->q_norm, weights->qk_eps, q + row * qkv_width, NULL,
                 attention.heads, width);
        rms_norm(k + row * qkv_width, NULL, weights->k_norm, weights->qk_eps, k + row * qkv_width, NULL,
                 attention.key_heads, width);
    }
    rotate(q, qkv_width, width, step->cosine, step->sine, q, qkv_width, width, rows,
           attention.heads + attention.key_heads, width / 2);
    if (attention.key_scales) {
        store_int8(k, qkv_width, width, step->slots, (int8_t *)attention.keys, (float *)attention.key_scales, rows,
                  attention.key_heads, width);
        store_int8(v, qkv_width, width, step->slots, (int8_t *)attention.values, (float *)attention.value_scales, rows,
                  attention.key_heads, width);
    } else {
        store_floats(k, qkv_width, width, step->slots, (float *)attention.keys, rows, attention.key_heads, width);
        store_floats(v, qkv_width, width, step->slots, (float *)attention.values, rows, attention.key_heads, width);
    }
    attention.q = q, attention.q_row = qkv_width, attention.out = attended, attention.rows = rows;
    attention.tables = step->tables, attention.offsets = step->offsets, attention.last = step->last;
    failed = failed || attend(&attention, step->longest) || multiply_part(attended, &weights->o, adapters, 1, product,
                                                                          rows);
    rms_norm(x, product, weights->mlp_norm, weights->mlp_eps, normed, total, rows, hidden);
    failed = failed || multiply_part(normed, &weights->gate_up, adapters, 2, gate, rows);
    swiglu(gate, 2 * ffn, gate + ffn, 2 * ffn, gated, rows, ffn);
    failed = failed || multiply_part(gated, &weights->down, adapters, 3, product, rows);
    for (int64_t i = 0; i < rows * hidden; i++) out[i] = total[i] + product[i];
    free(scratch);
    return failed;
}
