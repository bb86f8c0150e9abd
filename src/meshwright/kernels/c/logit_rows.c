/* Cross-entropy of rows of logits and its gradient in their place, as triton/loss_rows.py.

   Rows of V logits in fp32 or, where narrow, bf16, `apart` numbers from start to start. A row is read from memory once
   and written once: the cache holds it in between. Threads share the rows; no bit depends on their number. */

#include "vectors.h"

#define AT(row) ((char *)logits + (row) * apart * (narrow ? 2 : 4))
#define EACH_ROW                                                                                                        \
    const int64_t used = shared_by;                                                                                     \
    _Pragma("omp parallel for num_threads(used)") for (int64_t row = 0; row < rows; row++)

typedef struct {
    float peak, total, plain, chosen;
} RowSums;

/* Read the last `count` logits of a row, fewer than a vector, filled up with -inf. */
static inline lanes last_lanes(const void *from, int64_t i, int64_t count, int64_t narrow) {
    union { float in_fp32[16]; uint16_t in_bf16[16]; } part;
    for (int j = 0; j < 16; j++)
        if (narrow) part.in_bf16[j] = j < count ? ((const uint16_t *)from)[i + j] : 0xff80;
        else part.in_fp32[j] = j < count ? ((const float *)from)[i + j] : -INFINITY;
    return read_lanes(&part, 0, narrow);
}

static inline lanes row_lanes(const void *from, int64_t i, int64_t columns, int64_t narrow) {
    return i + 16 <= columns ? read_lanes(from, i, narrow) : last_lanes(from, i, columns - i, narrow);
}

static inline float number_at(const void *from, int64_t i, int64_t narrow) { return last_lanes(from, i, 1, narrow)[0]; }

static inline void write_number(float number, void *to, int64_t i, int64_t narrow) {
    float part[16];
    write_lanes((lanes){0} + number, part, 0, narrow);
    memcpy((char *)to + i * (narrow ? 2 : 4), part, narrow ? 2 : 4);
}

/* exp(x), exactly 0 far below 0: a masked logit gets no gradient. */
static inline lanes shares(lanes x) { return either(x < (lanes){0} - 87.0f, (lanes){0}, exponentials(x)); }

/* Return the maximum of a row, the sum of exp(logit - maximum), the sum of logits, and the logit of `target`, or 0. */
static RowSums gather(const void *row, int64_t target, int64_t columns, int64_t narrow) {
    lanes most = (lanes){0} - INFINITY, total[2] = {{0}, {0}}, plain[2] = {{0}, {0}};
    for (int64_t i = 0; i < columns; i += 16) most = larger(row_lanes(row, i, columns, narrow), most);
    RowSums sums = {.peak = most[0]};
    for (int j = 1; j < 16; j++) sums.peak = most[j] > sums.peak ? most[j] : sums.peak;
    const float shift = sums.peak == -INFINITY ? 0.0f : sums.peak; /* for a row of -inf only: exp(-inf) is 0 */
    for (int64_t i = 0; i < columns; i += 16) {
        const lanes x = row_lanes(row, i, columns, narrow);
        total[i / 16 % 2] += shares(x - shift);
        if (i + 16 <= columns) plain[i / 16 % 2] += x;
        else
            for (int64_t j = i; j < columns; j++) plain[0][j - i] += x[j - i];
    }
    sums.total = sum_of(total[0] + total[1]);
    sums.plain = sum_of(plain[0] + plain[1]);
    sums.chosen = target >= 0 && target < columns ? number_at(row, target, narrow) : 0.0f;
    return sums;
}

/* Write factor * (softmax * (1 + 2 z lse) - (1 - smoothing) onehot - smoothing / V) over the logits of a row. */
static void write_gradient(void *row, int64_t target, int64_t columns, int64_t vocabulary, float lse, float factor,
                           float smoothing, float z, int64_t narrow) {
    const float grown = factor * (1.0f + 2.0f * z * lse), even = factor * smoothing / (float)vocabulary;
    const int here = target >= 0 && target < columns;
    const float chosen = here ? number_at(row, target, narrow) : 0.0f;
    for (int64_t i = 0; i < columns; i += 16) {
        const lanes gradient = shares(row_lanes(row, i, columns, narrow) - lse) * grown - even;
        if (i + 16 <= columns) write_lanes(gradient, row, i, narrow);
        else
            for (int64_t j = i; j < columns; j++) write_number(gradient[j - i], row, j, narrow);
    }
    if (here) {
        const lanes share = shares((lanes){0} + (chosen - lse));
        write_number(share[0] * grown - even - factor * (1.0f - smoothing), row, target, narrow);
    }
}

/* Write the loss of each row (R,): 0 where ignored, NaN for a target without a column. `gradient`: overwrite the logits
   by it, times factors (R,), NULL = 1. */
void losses_of_rows(void *logits, int64_t apart, const int64_t *targets, const float *factors, float *losses,
                    int64_t rows, int64_t columns, int64_t ignored, int64_t gradient, float smoothing,
                    float z, int64_t narrow, int64_t shared_by) {
    EACH_ROW {
        const int64_t target = targets[row];
        if (target == ignored) {
            losses[row] = 0.0f;
            if (gradient) memset(AT(row), 0, columns * (narrow ? 2 : 4));
            continue;
        }
        const RowSums sums = gather(AT(row), target, columns, narrow);
        const float lse = sums.peak + logf(sums.total);
        float loss = lse - sums.chosen + z * lse * lse;
        if (smoothing != 0.0f) loss += smoothing * (sums.chosen - sums.plain / (float)columns);
        losses[row] = target >= 0 && target < columns ? loss : NAN;
        const float factor = factors ? factors[row] : 1.0f;
        if (gradient) write_gradient(AT(row), target, columns, columns, lse, factor, smoothing, z, narrow);
    }
}

/* Write the sums that `gather` returns for each row to found (4, R). */
void gather_rows(void *logits, int64_t apart, const int64_t *targets, int64_t first, float *found, int64_t rows,
                 int64_t columns, int64_t narrow, int64_t shared_by) {
    EACH_ROW {
        const RowSums sums = gather(AT(row), targets[row] - first, columns, narrow);
        found[row] = sums.peak;
        found[rows + row] = sums.total;
        found[2 * rows + row] = sums.plain;
        found[3 * rows + row] = sums.chosen;
    }
}

/* Write the gradient over rows with a known log-sum-exp over all devices. 0 where the factor is 0. */
void gradient_rows(void *logits, int64_t apart, const int64_t *targets, int64_t first, const float *sums,
                   const float *factors, int64_t rows, int64_t columns, int64_t vocabulary, float smoothing, float z,
                   int64_t narrow, int64_t shared_by) {
    EACH_ROW {
        if (factors[row] == 0.0f) memset(AT(row), 0, columns * (narrow ? 2 : 4));
        else
            write_gradient(AT(row), targets[row] - first, columns, vocabulary, sums[row], factors[row], smoothing, z,
                           narrow);
    }
}
