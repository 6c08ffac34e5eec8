// Weights from row-major float32, bfloat16 or float16, or from GGUF's blocks, into panels (matrix.h). A task packs a
// range of panels, so that threads share a tensor and its file's pages can be given back behind them.

#include "gemm.h"

typedef struct {
    matrix w;            // where to; its scales are `scales`
    float *scales;       // int8: [panels, 16]
    const void *source;  // rows from that of first_panel on
    int64_t row_bytes;   // from a row to the next
    int64_t type;        // of the source: FLOAT32, BFLOAT16, FLOAT16, or the GGUF type that w has
    int64_t first_panel, stop_panel, panels_per_task;
} pack_args;

ARGS_SIZE(pack)
EXPORT int64_t panel_bytes_of(int64_t format, int64_t depth) { return bytes_of_panel((int)format, depth); }

INLINE f16 f32_to_f16(float x) {  // to nearest even; a NaN stays one
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (f16)(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
    if (magnitude >= 0x477ff000) return (f16)(sign | 0x7c00);  // 65520 and more
    if (magnitude < 0x38800000) {  // below 2^-14: adding 0.5 leaves the rounded multiple of 2^-24 in the mantissa
        float shifted;
        memcpy(&shifted, &magnitude, sizeof shifted);
        shifted += 0.5f;
        memcpy(&bits, &shifted, sizeof bits);
        return (f16)(sign | (bits - 0x3f000000));
    }
    return (f16)(sign | ((magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13));
}

// `count` <= UNIT elements of a row as float32; zeros up to the unit's end.
static void read_unit(int64_t type, const void *row, int64_t k, int64_t count, float *out) {
    memset(out, 0, UNIT * sizeof(float));
    if (type == FLOAT32) {
        memcpy(out, (const float *)row + k, count * sizeof(float));
    } else if (type == BFLOAT16) {
        for (int64_t i = 0; i < count; i++) out[i] = bf16_to_f32(((const bf16 *)row)[k + i]);
    } else {
        f16 halves[UNIT] = {0};
        memcpy(halves, (const f16 *)row + k, count * sizeof(f16));
        for (int i = 0; i < UNIT; i += WIDTH) vstore(out + i, load_f16(halves + i));
    }
}

// Largest magnitude of a row / 127; NaN where the row holds one.
static float row_scale(const pack_args *a, const void *row) {
    uint32_t largest = 0;
    for (int64_t k = 0; k < a->w.depth; k += UNIT) {
        float values[UNIT];
        read_unit(a->type, row, k, a->w.depth - k < UNIT ? a->w.depth - k : UNIT, values);
        for (int i = 0; i < UNIT; i++) {
            uint32_t bits;
            memcpy(&bits, &values[i], sizeof bits);
            bits &= 0x7fffffff;
            largest = bits > largest ? bits : largest;
        }
    }
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    return magnitude / 127.0f;
}

INLINE int8_t quantised(float x, float inverse) {
    float scaled = x * inverse;
    return (int8_t)(scaled > -127.0f ? scaled < 127.0f ? rintf(scaled) : 127 : -127);  // NaN: -127, its scale is NaN
}

// A unit of 16 rows, values[16][32], into its place.
static void write_unit(int format, const float values[PANEL][UNIT], const float *inverses, void *unit) {
    for (int k = 0; k < UNIT; k++) {
        for (int r = 0; r < PANEL; r++) {
            const float x = values[r][k];
            if (format == FLOAT32) ((float *)unit)[k * PANEL + r] = x;
            else if (format == FLOAT16) ((f16 *)unit)[k * PANEL + r] = f32_to_f16(x);
            else if (format == BFLOAT16) ((bf16 *)unit)[(k / 2 * PANEL + r) * 2 + k % 2] = f32_to_bf16(x);
            else ((int8_t *)unit)[(k / 4 * PANEL + r) * 4 + k % 4] = quantised(x, inverses[r]);
        }
    }
}

static void pack_floats(const pack_args *a, int64_t index) {
    const int format = (int)a->w.format;
    const int64_t first = index * PANEL;
    const int64_t rows = a->w.num_outputs - first < PANEL ? a->w.num_outputs - first : PANEL;
    uint8_t *unit = (uint8_t *)a->w.panels + index * a->w.panel_bytes;
    const uint8_t *source = (const uint8_t *)a->source + (first - a->first_panel * PANEL) * a->row_bytes;
    float values[PANEL][UNIT] = {{0}}, inverses[PANEL] = {0};
    if (format == INT8) {
        for (int64_t r = 0; r < PANEL; r++) {
            const float scale = r < rows ? row_scale(a, source + r * a->row_bytes) : 0.0f;
            inverses[r] = scale != 0.0f ? 1.0f / scale : 0.0f;
            a->scales[first + r] = scale * 0x1p-24f;
        }
    }
    for (int64_t k = 0; k < a->w.depth; k += UNIT) {
        const int64_t count = a->w.depth - k < UNIT ? a->w.depth - k : UNIT;
        for (int64_t r = 0; r < rows; r++) read_unit(a->type, source + r * a->row_bytes, k, count, values[r]);
        switch (format) {
            case FLOAT32: write_unit(FLOAT32, values, inverses, unit); break;
            case FLOAT16: write_unit(FLOAT16, values, inverses, unit); break;
            case BFLOAT16: write_unit(BFLOAT16, values, inverses, unit); break;
            default: write_unit(INT8, values, inverses, unit); break;
        }
        unit += weight_bytes(format);
    }
}

INLINE uint32_t word(const uint8_t *p) {
    uint32_t value;
    memcpy(&value, p, sizeof value);
    return value;
}

INLINE void put(uint8_t *unit, int i, int64_t row, uint32_t value) {
    memcpy(unit + 64 * i + 4 * row, &value, sizeof value);
}

// The 6-bit scale and minimum of sub-block i of a Q4_K block.
INLINE void q4_k_scale(const uint8_t *packed, int i, uint8_t *scale, uint8_t *minimum) {
    if (i < 4) {
        *scale = packed[i] & 63;
        *minimum = packed[i + 4] & 63;
    } else {
        *scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4);
        *minimum = (packed[i + 4] >> 4) | (packed[i] >> 6 << 4);
    }
}

// One row of a panel, all its blocks.
static void pack_q8_0(const uint8_t *block, int64_t units, int64_t row, uint8_t *weights, uint8_t *scale) {
    for (int64_t u = 0; u < units; u++, block += 34, weights += 512, scale += 32) {
        memcpy(scale + 2 * row, block, 2);
        for (int i = 0; i < QUADS; i++) put(weights, i, row, word(block + 2 + 4 * i));
    }
}

static void pack_q4_0(const uint8_t *block, int64_t units, int64_t row, uint8_t *weights, uint8_t *scale) {
    for (int64_t u = 0; u < units; u++, block += 18, weights += 256, scale += 32) {
        memcpy(scale + 2 * row, block, 2);
        for (int i = 0; i < 4; i++) put(weights, i, row, word(block + 2 + 4 * i));
    }
}

static void pack_q4_1(const uint8_t *block, int64_t units, int64_t row, uint8_t *weights, uint8_t *scale) {
    for (int64_t u = 0; u < units; u++, block += 20, weights += 256, scale += 64) {
        memcpy(scale + 2 * row, block, 2);
        memcpy(scale + 32 + 2 * row, block + 2, 2);
        for (int i = 0; i < 4; i++) put(weights, i, row, word(block + 4 + 4 * i));
    }
}

// d, dmin, 12 bytes of scales, 4 x 32 bytes whose low nibbles are one sub-block and whose high ones are the next.
static void pack_q4_k(const uint8_t *block, int64_t units, int64_t row, uint8_t *weights, uint8_t *scale,
        uint8_t *super) {
    for (int64_t u = 0; u < units; u += 2, weights += 512, scale += 64) {
        const uint8_t *pair = block + 16 + u % 8 * 16;
        if (u % 8 == 0) memcpy(super + u / 8 * 64 + 2 * row, block, 2);
        if (u % 8 == 0) memcpy(super + u / 8 * 64 + 32 + 2 * row, block + 2, 2);
        q4_k_scale(block + 4, u % 8, scale + row, scale + 16 + row);
        q4_k_scale(block + 4, u % 8 + 1, scale + 32 + row, scale + 48 + row);
        for (int i = 0; i < 4; i++) {
            const uint32_t near = word(pair + 4 * i), far = word(pair + 16 + 4 * i);
            put(weights, i, row, (near & 0x0f0f0f0f) | (far & 0x0f0f0f0f) << 4);
            put(weights + 256, i, row, (near >> 4 & 0x0f0f0f0f) | (far & 0xf0f0f0f0));
        }
        if (u % 8 == 6) block += 144;
    }
}

// 128 bytes of low nibbles, 64 of upper bits, 16 scales, d. Half h of a block is sub-blocks of 32: its bytes 0..31 and
// 32..63 low, then both high; upper bits 0, 2, 4, 6 of its 32 bytes.
static void pack_q6_k(const uint8_t *block, int64_t units, int64_t row, uint8_t *weights, uint8_t *scale,
        uint8_t *super) {
    for (int64_t u = 0; u < units; u++, weights += 384, scale += 32) {
        const int h = u % 8 / 4, sub = u % 4;
        const uint8_t *low = block + 64 * h + 32 * (sub & 1), *high = block + 128 + 32 * h;
        if (u % 8 == 0) memcpy(super + u / 8 * 32 + 2 * row, block + 208, 2);
        scale[row] = block[192 + u % 8 * 2];
        scale[16 + row] = block[192 + u % 8 * 2 + 1];
        uint32_t upper[2] = {0, 0};
        for (int i = 0; i < 4; i++) {
            const uint32_t near = word(low + 4 * i) >> (sub & 2) * 2, far = word(low + 16 + 4 * i) >> (sub & 2) * 2;
            put(weights, i, row, (near & 0x0f0f0f0f) | (far & 0x0f0f0f0f) << 4);
            upper[0] |= (word(high + 4 * i) >> 2 * sub & 0x03030303) << 2 * i;
            upper[1] |= (word(high + 16 + 4 * i) >> 2 * sub & 0x03030303) << 2 * i;
        }
        put(weights + 256, 0, row, upper[0]);
        put(weights + 256, 1, row, upper[1]);
        if (u % 8 == 7) block += 210;
    }
}

static void pack_blocks(const pack_args *a, int64_t index) {
    const int64_t units = num_units(a->w.depth), first = index * PANEL;
    uint8_t *start = (uint8_t *)a->w.panels + index * a->w.panel_bytes;
    const panel p = panel_at((int)a->w.format, &a->w, index);
    uint8_t *scale = (uint8_t *)p.scales, *super = (uint8_t *)p.supers;
    if (first + PANEL > a->w.num_outputs) memset(start, 0, a->w.panel_bytes);
    for (int64_t r = 0; r < PANEL && first + r < a->w.num_outputs; r++) {
        const uint8_t *row = (const uint8_t *)a->source + (first + r - a->first_panel * PANEL) * a->row_bytes;
        switch (a->w.format) {
            case Q8_0: pack_q8_0(row, units, r, start, scale); break;
            case Q4_0: pack_q4_0(row, units, r, start, scale); break;
            case Q4_1: pack_q4_1(row, units, r, start, scale); break;
            case Q4_K: pack_q4_k(row, units, r, start, scale, super); break;
            default: pack_q6_k(row, units, r, start, scale, super); break;
        }
    }
}

EXPORT void pack(const void *args, int64_t task) {
    const pack_args *a = args;
    const int64_t start = a->first_panel + task * a->panels_per_task, end = start + a->panels_per_task;
    for (int64_t p = start; p < end && p < a->stop_panel; p++) {
        if (a->w.format <= INT8) pack_floats(a, p);
        else pack_blocks(a, p);
    }
}
