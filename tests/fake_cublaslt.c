// Stands in for libcublasLt where there is no GPU: it multiplies host arrays by the descriptors it is given, column-major
// as cuBLAS does, keeps a log of its calls, counts what is not destroyed, and fails when told to.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int kind, compute, scale, transa, transb, epilogue; const void* bias; } Desc;
typedef struct { int type; uint64_t rows, cols; int64_t ld; } Layout;
typedef struct { int unused; } Handle;
typedef struct { uint64_t data[8]; } Algo;
typedef struct { Algo algo; size_t workspace; int state; float waves; int reserved[4]; } Result;

static char events[1 << 16];
static int num_live, fail_status, num_results = 3;
static const char* fail_name = "";

#define NOTE(...) snprintf(events + strlen(events), sizeof events - strlen(events), __VA_ARGS__)
#define MAY_FAIL() if (!strcmp(fail_name, __func__)) return fail_status

const char* fake_events(void) { return events; }
int fake_live(void) { return num_live; }
void fake_reset(void) { events[0] = 0, fail_name = "", num_results = 3; }
void fake_fail(const char* name, int status) { fail_name = strdup(name), fail_status = status; }
void fake_results(int count) { num_results = count; }

size_t cublasLtGetVersion(void) { return 120903; }
const char* cublasLtGetStatusName(int status) {
    return status == 1 ? "CUBLAS_STATUS_NOT_INITIALIZED" : status == 7 ? "CUBLAS_STATUS_INVALID_VALUE"
         : status == 13 ? "CUBLAS_STATUS_EXECUTION_FAILED" : 0;
}

static int make(void** out, size_t size, const void* value) {
    *out = malloc(size);
    memcpy(*out, value, size);
    ++num_live;
    return 0;
}
static int drop(void* p) { free(p); --num_live; return 0; }

int cublasLtCreate(void** handle) { MAY_FAIL(); Handle h = {0}; return make(handle, sizeof h, &h); }
int cublasLtDestroy(void* handle) { return drop(handle); }
int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
    MAY_FAIL();
    NOTE("desc %d %d\n", compute, scale);
    Desc d = {0, compute, scale, 0, 0, 1, 0};
    return make(desc, sizeof d, &d);
}
int cublasLtMatmulDescDestroy(void* desc) { return drop(desc); }
int cublasLtMatmulDescSetAttribute(Desc* d, int attribute, const void* value, size_t size) {
    MAY_FAIL();
    if (attribute == 3 && size == 4) d->transa = *(const int32_t*)value;
    else if (attribute == 4 && size == 4) d->transb = *(const int32_t*)value;
    else if (attribute == 7 && size == 4) d->epilogue = *(const uint32_t*)value;
    else if (attribute == 8 && size == 8) d->bias = *(const void* const*)value;
    else return 7;
    return 0;
}
int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    MAY_FAIL();
    Layout l = {type, rows, cols, ld};
    return make(layout, sizeof l, &l);
}
int cublasLtMatrixLayoutDestroy(void* layout) { return drop(layout); }
int cublasLtMatmulPreferenceCreate(void** preference) { MAY_FAIL(); int p = 0; return make(preference, sizeof p, &p); }
int cublasLtMatmulPreferenceDestroy(void* preference) { return drop(preference); }
int cublasLtMatmulPreferenceSetAttribute(void* p, int attribute, const void* value, size_t size) {
    (void)p;
    NOTE("preference %d %llu\n", attribute,
         size == 8 ? (unsigned long long)*(const uint64_t*)value : (unsigned long long)*(const uint32_t*)value);
    return size == (attribute == 1 ? 8 : 4) ? 0 : 7;
}

// 0 where the descriptors fit together.
static int misfit(const Desc* d, const Layout* a, const Layout* b, const Layout* c, const Layout* out) {
    const uint64_t m = d->transa ? a->cols : a->rows, k = d->transa ? a->rows : a->cols;
    const uint64_t kb = d->transb ? b->cols : b->rows, n = d->transb ? b->rows : b->cols;
    const int is_ok = k == kb && out->rows == m && out->cols == n && c->rows == m && c->cols == n &&
                      a->ld >= (int64_t)a->rows && b->ld >= (int64_t)b->rows && out->ld >= (int64_t)m &&
                      a->type == b->type && d->compute == 68 && d->scale == 0;
    return is_ok ? 0 : 7;
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, const Desc* d, const Layout* a, const Layout* b, const Layout* c,
                                   const Layout* out, void* preference, int wanted, Result* results, int* count) {
    (void)handle, (void)preference;
    MAY_FAIL();
    if (misfit(d, a, b, c, out)) return 7;
    NOTE("heuristic %d, bias at %llu\n", wanted, (unsigned long long)(uintptr_t)d->bias);
    *count = wanted < num_results ? wanted : num_results;
    for (int i = 0; i < *count; ++i) {
        for (int j = 0; j < 8; ++j) results[i].algo.data[j] = 100 * i + j;
        results[i].workspace = 1000 * i;
        results[i].state = i == 1 ? 15 : 0;
    }
    return *count ? 0 : 15;
}

static float read_float(int type, const void* p, int64_t i) {
    if (type == 0) return ((const float*)p)[i];
    if (type == 2) return (float)((const _Float16*)p)[i];
    uint32_t bits = (uint32_t)((const uint16_t*)p)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static void write_float(int type, void* p, int64_t i, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (type == 0) ((float*)p)[i] = x;
    else if (type == 2) ((_Float16*)p)[i] = (_Float16)x;
    else ((uint16_t*)p)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

int cublasLtMatmul(void* handle, const Desc* d, const float* alpha, const void* A, const Layout* a, const void* B,
                   const Layout* b, const float* beta, const void* C, const Layout* c, void* D, const Layout* out,
                   const Algo* algo, void* workspace, size_t workspace_bytes, void* stream) {
    (void)handle;
    MAY_FAIL();
    if (misfit(d, a, b, c, out)) return 7;
    NOTE("matmul algorithm %llu workspace %llx %zu stream %llx\n", (unsigned long long)algo->data[7],
         (unsigned long long)(uintptr_t)workspace, workspace_bytes, (unsigned long long)(uintptr_t)stream);
    const uint64_t depth = d->transa ? a->rows : a->cols;
    for (uint64_t j = 0; j < out->cols; ++j)
        for (uint64_t i = 0; i < out->rows; ++i) {
            float sum = 0;
            for (uint64_t k = 0; k < depth; ++k)
                sum += read_float(a->type, A, d->transa ? k + i * a->ld : i + k * a->ld) *
                       read_float(b->type, B, d->transb ? j + k * b->ld : k + j * b->ld);
            sum *= *alpha;
            if (*beta != 0) sum += *beta * read_float(c->type, C, i + j * c->ld);
            if (d->epilogue == 4) sum += read_float(out->type, d->bias, i);
            write_float(out->type, D, i + j * out->ld, sum);
        }
    return 0;
}
