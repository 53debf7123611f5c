// cuBLASLt as tdx calls it: checks what it is given, computes float32 at once, keeps a log.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
    int compute, scale, turned[2], epilogue, bias_type, mode[2];
    void *bias, *scales[2];
    int8_t fast;
} Product;
typedef struct {
    int type;
    uint64_t rows, columns;
    int64_t line;
} Layout;
typedef struct {
    uint64_t workspace;
    uint32_t reductions, alignment[4];
} Preference;
typedef struct {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} Found;
typedef struct {  // of a call, in rows as its caller sees them
    uint64_t a, b, c, bias, scale_a, scale_b, workspace, stream, rows, columns, depth, type;
} Entry;

static char *const handle = (char *)0x7f0087654321;
int fakecublas_version = 130100;
int fakecublas_status, fakecublas_refuses, fakecublas_live, fakecublas_handles, fakecublas_count;
// Algorithms it names, each third of which splits K; the fast one, others sleep; one that it
// refuses; the one of the last call.
int fakecublas_named = 1, fakecublas_fast = -1, fakecublas_refused = -1, fakecublas_last = -1;
Entry fakecublas_log[256];

static void *make(size_t bytes) {
    fakecublas_live++;
    return calloc(1, bytes);
}
static int drop(void *thing) {
    fakecublas_live--;
    free(thing);
    return 0;
}

int cublasLtCreate(void **given) {
    if (fakecublas_status) return fakecublas_status;
    fakecublas_handles++;
    *given = handle;
    return 0;
}
int cublasLtDestroy(void *h) {
    fakecublas_handles--;
    return h == handle ? 0 : 1;
}
size_t cublasLtGetVersion(void) { return fakecublas_version; }
const char *cublasLtGetStatusName(int number) {
    return number == 14 ? "CUBLAS_STATUS_INTERNAL_ERROR" : NULL;
}

int cublasLtMatmulDescCreate(Product **to, int compute, int scale) {
    *to = make(sizeof(Product));
    (*to)->compute = compute, (*to)->scale = scale, (*to)->epilogue = 1;
    return 0;
}
int cublasLtMatmulDescDestroy(Product *x) { return drop(x); }
int cublasLtMatmulDescSetAttribute(Product *x, int which, const void *value, size_t size) {
    struct { int which; void *to; size_t size; } known[] = {
        {3, &x->turned[0], 4}, {4, &x->turned[1], 4}, {7, &x->epilogue, 4}, {8, &x->bias, 8},
        {17, &x->scales[0], 8}, {18, &x->scales[1], 8}, {25, &x->fast, 1}, {26, &x->bias_type, 4},
        {31, &x->mode[0], 4}, {32, &x->mode[1], 4},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].which == which && known[i].size == size &&
            (which < 31 || fakecublas_version >= 120900)) {
            memcpy(known[i].to, value, size);
            return 0;
        }
    return 7;
}

int cublasLtMatrixLayoutCreate(Layout **to, int type, uint64_t rows, uint64_t columns, int64_t line) {
    *to = make(sizeof(Layout));
    **to = (Layout){type, rows, columns, line};
    return line < (int64_t)rows ? 7 : 0;
}
int cublasLtMatrixLayoutDestroy(Layout *x) { return drop(x); }

int cublasLtMatmulPreferenceCreate(Preference **to) { return *to = make(sizeof(Preference)), 0; }
int cublasLtMatmulPreferenceDestroy(Preference *x) { return drop(x); }
int cublasLtMatmulPreferenceSetAttribute(Preference *x, int which, const void *value, size_t size) {
    if (which == 1 && size == 8) return memcpy(&x->workspace, value, 8), 0;
    if (which == 3 && size == 4) return memcpy(&x->reductions, value, 4), 0;
    if (which >= 5 && which <= 8 && size == 4) return memcpy(&x->alignment[which - 5], value, 4), 0;
    return 7;
}

static int check(const Product *x, const Layout *a, const Layout *b, const Layout *c) {
    uint64_t m = c->rows, n = c->columns, k = x->turned[0] ? a->rows : a->columns;
    if (x->compute != 68 && x->compute != 77) return 7;
    if ((x->turned[0] ? a->columns : a->rows) != m || (x->turned[1] ? b->columns : b->rows) != k ||
        (x->turned[1] ? b->rows : b->columns) != n || a->type != b->type)
        return 7;
    if (a->type == 28 && (!x->turned[0] || x->turned[1] || m % 16 || k % 16)) return 15;
    return a->type == 28 ? !x->scales[0] * 7 : 0;
}

int cublasLtMatmulAlgoGetHeuristic(void *h, Product *x, Layout *a, Layout *b, Layout *c, Layout *d,
                                   Preference *wanted, int most, Found *found, int *count) {
    if (fakecublas_refuses) return *count = 0, 0;
    if (h != handle || most < 1 || c != d || wanted->reductions != 2) return 7;
    for (int i = 0; i < 4; i++)
        if (wanted->alignment[i] != 16) return 7;
    size_t workspace = wanted->workspace < 4096 ? 0 : 4096;
    *count = most < fakecublas_named ? most : fakecublas_named;
    for (int i = 0; i < *count; i++) found[i] = (Found){.workspace = workspace, .algorithm = {11, 22, i}};
    return check(x, a, b, d);
}

int cublasLtMatmulAlgoConfigGetAttribute(const uint64_t *algorithm, int which, void *to, size_t size,
                                         size_t *written) {
    if ((which != 0 && which != 2) || size != 4 || algorithm[0] != 11) return 7;
    uint32_t value = which ? 1 + (algorithm[2] % 3 == 2) : 66;
    memcpy(to, &value, 4);
    return *written = 4, 0;
}

int cublasLtMatmul(void *h, Product *x, const float *alpha, const float *a, Layout *la,
                   const float *b, Layout *lb, const float *beta, const float *c, Layout *lc,
                   float *d, Layout *ld, const uint64_t *algorithm, void *workspace, size_t bytes,
                   void *stream) {
    if (fakecublas_status) return fakecublas_status;
    if (h != handle || algorithm[0] != 11 || algorithm[1] != 22 || *alpha != 1 || *beta != 0) return 7;
    if (algorithm[2] == (uint64_t)fakecublas_refused) return 15;
    fakecublas_last = algorithm[2];
    if (fakecublas_fast >= 0 && fakecublas_last != fakecublas_fast)
        usleep(fakecublas_last ? 1500 : 500);  // the first one is chosen where none is fast
    if (c != d || lc != ld || bytes != 4096 || !workspace || check(x, la, lb, ld)) return 7;
    if (((uintptr_t)a | (uintptr_t)b | (uintptr_t)d) % 16) return 7;
    for (int i = 0; i < 2; i++)
        if (x->mode[i] == 3 && (uintptr_t)x->scales[i] % 16) return 7;
    int64_t m = ld->rows, n = ld->columns, k = x->turned[0] ? la->rows : la->columns;
    const float *bias = x->epilogue == 4 ? x->bias : NULL;
    fakecublas_log[fakecublas_count++ % 256] = (Entry){
        (uintptr_t)b, (uintptr_t)a, (uintptr_t)d, (uintptr_t)bias, (uintptr_t)x->scales[1],
        (uintptr_t)x->scales[0], (uintptr_t)workspace, (uintptr_t)stream, n, m, k, la->type};
    if (la->type || ld->type) return 0;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            float sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += a[x->turned[0] ? l + i * la->line : i + l * la->line] *
                       b[x->turned[1] ? j + l * lb->line : l + j * lb->line];
            d[i + j * ld->line] = sum + (bias ? bias[i] : 0);
        }
    return 0;
}
