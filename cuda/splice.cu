// Rotate and scatter: reads staged KV chunks once and writes them to the slots of a paged cache, K turned to its new
// position. One kernel serves every paged format, since the host reduces each to strides (python/kvsplice/splicer/).
// The reference is python/kvsplice/splicer/cpu.py; the structures are mirrored in python/kvsplice/splicer/cuda.py.
//
// Factor of a (token, frequency) pair: new * conj(old) / |old|^2 with the rows of the engine's own cos/sin table, in
// fp32. It is the exact inverse of the old row, whatever magnitude the table carries (YaRN), and it is reused over layers.
//
// No header is included: NVRTC compiles this file as it stands.

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// One layer of a segment.
struct Slab {
    u64 paged;   // address of the segment's first element in block 0
    i64 staged;  // byte offset of the same element's row in a staged object
};

// One run of elements of every head of a plane that is treated alike. Strides in bytes, the rest in elements.
struct Segment {
    const Slab* slabs;
    i64 block_stride, token_stride, head_stride, element_stride;  // paged
    i64 staged_token_stride, staged_head_stride;
    const void* table;  // rows of cosines then sines
    i64 table_stride;   // elements from row to row
    int table_kind;     // TABLE_*
    int operation;      // COPY, HALVES, PAIRS
    int heads;
    int items;    // accesses per head; each is an access A and, unless partner is 0, an access B
    int step;     // from one A to the next
    int partner;  // from A to B
    int half;     // half the rotated width: from a cosine to its sine
    int unused;
};

// What one launch does of one segment.
struct Part {
    int first_unit;
    int tiles;  // blocks' worth of items in a chunk
    int first_slab, slabs;
};

struct Chunk {
    u64 source;             // address of the staged object
    i64 old_start;          // position of its first token when it was stored; UNROTATED if K was stored without rope
    i64 cur_start;          // position of its first token now
    i64 offset;             // first token taken, counted in the object
    i64 count;              // tokens taken
};

enum { MAX_SEGMENTS = 8 };

struct Launch {
    const Chunk* chunks;
    const int* blocks;  // the group's block table
    u64 source;         // the staged object instead of the chunk's own, unless 0
    i64 units;
    int units_per_chunk;
    int block_size;
    int segments;
    int slabs_per_unit;
    Part part[MAX_SEGMENTS];
    Segment segment[MAX_SEGMENTS];
};

enum Operation { COPY = 0, HALVES = 1, PAIRS = 2 };  // NeoX rotates element i with i + half, GPT-J 2i with 2i + 1
enum Table { TABLE_FP32 = 0, TABLE_BF16 = 1, TABLE_FP16 = 2 };
enum { UNROTATED = -1, THREADS = 256 };

__device__ __forceinline__ float bits_to_float(u32 bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float half_to_float(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// ---- element types: 32 bits of storage <-> floats -------------------------------------------------------------------

struct Fp32 {
    static constexpr int size = 4;
    static __device__ __forceinline__ void decode(u32 word, float* out) { out[0] = bits_to_float(word); }
    static __device__ __forceinline__ u32 encode(const float* in) { return __float_as_uint(in[0]); }
};

struct Bf16 {
    static constexpr int size = 2;
    static __device__ __forceinline__ void decode(u32 word, float* out) {
        out[0] = bits_to_float(word << 16);
        out[1] = bits_to_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ u32 encode(const float* in) {
        u32 word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
        return word;
    }
};

struct Fp16 {
    static constexpr int size = 2;
    static __device__ __forceinline__ void decode(u32 word, float* out) {
        out[0] = half_to_float(static_cast<u16>(word));
        out[1] = half_to_float(static_cast<u16>(word >> 16));
    }
    static __device__ __forceinline__ u32 encode(const float* in) {
        u32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(in[1]), "f"(in[0]));
        return word;
    }
};

// fp32 -> an 8-bit float with MANTISSA bits, exponent BIAS and largest finite code LARGEST: round to nearest even,
// saturating to the largest finite value. Targets before sm_89 have no instruction for it.
template <int MANTISSA, int BIAS, u32 LARGEST, u32 NOT_A_NUMBER>
__device__ __forceinline__ u32 encode_fp8(float value) {
    const u32 bits = __float_as_uint(value);
    const u32 sign = (bits >> 24) & 0x80u;
    const u32 magnitude = bits & 0x7fffffffu;
    constexpr u32 smallest_normal = static_cast<u32>(127 - BIAS + 1) << 23;
    u32 code;
    if (magnitude < smallest_normal) {
        // Adding a power of two whose last bit weighs one step of the subnormals leaves the rounded step count in the low bits.
        constexpr u32 anchor = static_cast<u32>(127 - BIAS + 1 - MANTISSA + 23) << 23;
        code = __float_as_uint(__fadd_rn(bits_to_float(magnitude), bits_to_float(anchor))) - anchor;
    } else {
        constexpr int dropped = 23 - MANTISSA;
        const u32 odd = (magnitude >> dropped) & 1u;
        const u32 rounded = (magnitude + (1u << (dropped - 1)) - 1u + odd) >> dropped;
        code = rounded - (static_cast<u32>(127 - BIAS) << MANTISSA);
        code = code < LARGEST ? code : LARGEST;
    }
    return sign | (magnitude > 0x7f800000u ? NOT_A_NUMBER : code);
}

struct E4m3 {
    static constexpr int size = 1;
    static __device__ __forceinline__ float decode_one(u32 code) {
        // As the top bits of an fp16 the exponent is 8 too small; fp16's subnormals hold e4m3's.
        const u16 shifted = static_cast<u16>(((code & 0x80u) << 8) | ((code & 0x7fu) << 7));
        const float value = half_to_float(shifted) * 256.0f;
        return (code & 0x7fu) == 0x7fu ? bits_to_float(0x7fc00000u) : value;
    }
    static __device__ __forceinline__ void decode(u32 word, float* out) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = decode_one((word >> (8 * i)) & 0xffu);
    }
    static __device__ __forceinline__ u32 encode(const float* in) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= encode_fp8<3, 7, 0x7eu, 0x7fu>(in[i]) << (8 * i);
        return word;
    }
};

struct E5m2 {
    static constexpr int size = 1;
    static __device__ __forceinline__ void decode(u32 word, float* out) {
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] = half_to_float(static_cast<u16>(((word >> (8 * i)) & 0xffu) << 8));
    }
    static __device__ __forceinline__ u32 encode(const float* in) {
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) word |= encode_fp8<2, 15, 0x7bu, 0x7fu>(in[i]) << (8 * i);
        return word;
    }
};

// ---- accesses -------------------------------------------------------------------------------------------------------

// 16 bytes, or 8 of 8-bit elements: the factors of 16 of those would not fit the registers.
template <typename Type>
struct Vector {
    static constexpr int bytes = Type::size == 1 ? 8 : 16;
    static constexpr int elements = bytes / Type::size, words = bytes / 4;
    u32 word[words];
    __device__ __forceinline__ void load(u64 address) {
        if constexpr (words == 4) {
            asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
                         : "l"(address));
        } else {
            asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                         : "=r"(word[0]), "=r"(word[1])
                         : "l"(address));
        }
    }
    __device__ __forceinline__ void store(u64 address) const {
        if constexpr (words == 4) {
            asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word[0]), "r"(word[1]),
                         "r"(word[2]), "r"(word[3])
                         : "memory");
        } else {
            asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(word[0]), "r"(word[1]) : "memory");
        }
    }
};

// One element, at any address that is a multiple of its size.
template <typename Type>
struct Element {
    static constexpr int elements = 1, words = 1;
    u32 word[words];
    __device__ __forceinline__ void load(u64 address) {
        if (Type::size == 4) {
            asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(word[0]) : "l"(address));
        } else if (Type::size == 2) {
            u16 narrow;
            asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(narrow) : "l"(address));
            word[0] = narrow;
        } else {
            asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(word[0]) : "l"(address));
        }
    }
    __device__ __forceinline__ void store(u64 address) const {
        if (Type::size == 4) {
            asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(word[0]) : "memory");
        } else if (Type::size == 2) {
            asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(static_cast<u16>(word[0])) : "memory");
        } else {
            asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(word[0]) : "memory");
        }
    }
};

// ---- factors --------------------------------------------------------------------------------------------------------

struct Factor {
    float re, im;
};

// COUNT entries of a table, from entry `index` on.
template <typename Type, int COUNT>
__device__ __forceinline__ void load_entries(const void* table, i64 index, float* out) {
    constexpr int per_word = 4 / Type::size, per_vector = 16 / Type::size;
    const u64 address = reinterpret_cast<u64>(table) + index * Type::size;
    if constexpr (COUNT % per_vector == 0) {
        if (address % 16 == 0) {
#pragma unroll
            for (int i = 0; i < COUNT; i += per_vector) {
                Vector<Type> vector;
                vector.load(address + i * Type::size);
#pragma unroll
                for (int w = 0; w < 4; ++w) Type::decode(vector.word[w], out + i + w * per_word);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        Element<Type> element;
        element.load(address + i * Type::size);
        float decoded[per_word];
        Type::decode(element.word[0], decoded);
        out[i] = decoded[0];
    }
}

template <int COUNT>
__device__ __forceinline__ void load_row(const Segment& segment, i64 row, int column, float* out) {
    const i64 index = row * segment.table_stride + column;
    if (segment.table_kind == TABLE_FP32) {
        load_entries<Fp32, COUNT>(segment.table, index, out);
    } else if (segment.table_kind == TABLE_BF16) {
        load_entries<Bf16, COUNT>(segment.table, index, out);
    } else {
        load_entries<Fp16, COUNT>(segment.table, index, out);
    }
}

template <int COUNT>
__device__ __forceinline__ void load_factors(const Segment& segment, i64 old_row, i64 cur_row, int frequency, Factor* out) {
    if constexpr (COUNT > 4) {
        load_factors<COUNT / 2>(segment, old_row, cur_row, frequency, out);
        load_factors<COUNT / 2>(segment, old_row, cur_row, frequency + COUNT / 2, out + COUNT / 2);
        return;
    }
    float cosines[COUNT], sines[COUNT];
    load_row<COUNT>(segment, cur_row, frequency, cosines);
    load_row<COUNT>(segment, cur_row, frequency + segment.half, sines);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) out[i] = Factor{cosines[i], sines[i]};
    if (old_row == UNROTATED) return;
    load_row<COUNT>(segment, old_row, frequency, cosines);
    load_row<COUNT>(segment, old_row, frequency + segment.half, sines);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        const float scale = 1.0f / (cosines[i] * cosines[i] + sines[i] * sines[i]);
        const Factor cur_factor = out[i];
        out[i].re = (cur_factor.re * cosines[i] + cur_factor.im * sines[i]) * scale;
        out[i].im = (cur_factor.im * cosines[i] - cur_factor.re * sines[i]) * scale;
    }
}

__device__ __forceinline__ void turn(float& x, float& y, Factor factor) {
    const float re = x * factor.re - y * factor.im;
    y = x * factor.im + y * factor.re;
    x = re;
}

// Word by word, since all of a vector's elements as floats would not fit the registers.
template <int OPERATION, typename Type, typename Access>
__device__ __forceinline__ void rotate(Access& a, Access& b, bool both, const Factor* factors) {
    constexpr int N = Access::elements, per_word = 4 / Type::size;
    if constexpr (OPERATION == HALVES || N == 1) {
#pragma unroll
        for (int w = 0; w < Access::words; ++w) {
            float x[per_word], y[per_word];
            Type::decode(a.word[w], x);
            Type::decode(b.word[w], y);
#pragma unroll
            for (int i = 0; i < per_word && i < N; ++i) turn(x[i], y[i], factors[w * per_word + i]);
            a.word[w] = Type::encode(x);
            b.word[w] = Type::encode(y);
        }
    } else {
        constexpr int span = per_word > 2 ? per_word : 2, words = span / per_word;
#pragma unroll
        for (int which = 0; which < 2; ++which) {
            if (which == 1 && !both) return;
            Access& access = which == 0 ? a : b;
            const Factor* own = factors + which * (N / 2);
#pragma unroll
            for (int first = 0; first < N; first += span) {
                float x[span];
#pragma unroll
                for (int w = 0; w < words; ++w) Type::decode(access.word[first / per_word + w], x + w * per_word);
#pragma unroll
                for (int i = 0; i < span; i += 2) turn(x[i], x[i + 1], own[(first + i) / 2]);
#pragma unroll
                for (int w = 0; w < words; ++w) access.word[first / per_word + w] = Type::encode(x + w * per_word);
            }
        }
    }
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// One thread's item in the layers of its unit. Loads of several layers are in flight before the first is used.
template <int OPERATION, typename Type, typename Access>
__device__ __forceinline__ void move(const Slab* slabs, int count, u64 source, i64 staged_partner, i64 paged, i64 paged_partner,
                                     bool both, const Factor* factors) {
    constexpr int in_flight = 4;
    for (int layer = 0; layer < count; layer += in_flight) {
        Access a[in_flight], b[in_flight];
        u64 destination[in_flight];
#pragma unroll
        for (int i = 0; i < in_flight; ++i) {
            if (layer + i < count) {
                const Slab slab = slabs[layer + i];
                destination[i] = slab.paged + paged;
                a[i].load(source + slab.staged);
                if (both) b[i].load(source + slab.staged + staged_partner);
            }
        }
#pragma unroll
        for (int i = 0; i < in_flight; ++i) {
            if (layer + i < count) {
                if constexpr (OPERATION != COPY) rotate<OPERATION, Type>(a[i], b[i], both, factors);
                a[i].store(destination[i]);
                if (both) b[i].store(destination[i] + paged_partner);
            }
        }
    }
}

template <typename Type, template <typename> class Kind>
__device__ __forceinline__ void splice(const Launch& launch) {
    using Access = Kind<Type>;
    constexpr int N = Access::elements;
    for (i64 unit = blockIdx.x; unit < launch.units; unit += gridDim.x) {
        const int chunk_index = static_cast<int>(unit / launch.units_per_chunk);
        int rest = static_cast<int>(unit - static_cast<i64>(chunk_index) * launch.units_per_chunk);
        int index = 0;
        while (index + 1 < launch.segments && rest >= launch.part[index + 1].first_unit) ++index;
        const Part& part = launch.part[index];
        const Segment& segment = launch.segment[index];
        rest -= part.first_unit;
        const int split = rest / part.tiles;
        const u32 item = static_cast<u32>(rest - split * part.tiles) * THREADS + threadIdx.x;
        const u32 per_token = static_cast<u32>(segment.heads * segment.items);
        const u32 token = item / per_token;
        const u32 in_token = item - token * per_token;
        const u32 head = in_token / static_cast<u32>(segment.items);
        const i64 element = static_cast<i64>(in_token - head * segment.items) * segment.step;

        const Chunk chunk = launch.chunks[chunk_index];
        if (token >= chunk.count) continue;
        const i64 position = chunk.cur_start + token;
        const i64 block = position / launch.block_size;
        const i64 paged = launch.blocks[block] * segment.block_stride +
                          (position - block * launch.block_size) * segment.token_stride + head * segment.head_stride +
                          element * segment.element_stride;
        const u64 object = launch.source ? launch.source : chunk.source;
        const u64 source = object + (chunk.offset + token) * segment.staged_token_stride +
                           head * segment.staged_head_stride + element * Type::size;
        const i64 staged_partner = static_cast<i64>(segment.partner) * Type::size;
        const i64 paged_partner = segment.partner * segment.element_stride;
        const bool both = segment.partner != 0;
        const int first = split * launch.slabs_per_unit;
        const int count = min(launch.slabs_per_unit, part.slabs - first);
        const Slab* slabs = segment.slabs + part.first_slab + first;

        if (segment.operation == COPY || chunk.old_start == chunk.cur_start) {
            move<COPY, Type, Access>(slabs, count, source, staged_partner, paged, paged_partner, both, nullptr);
            continue;
        }
        const i64 old_row = chunk.old_start == UNROTATED ? -1 : chunk.old_start + token;
        Factor factors[N];
        if (segment.operation == HALVES || N == 1) {
            load_factors<N>(segment, old_row, position, static_cast<int>(N == 1 && segment.operation == PAIRS ? element / 2 : element),
                            factors);
            move<HALVES, Type, Access>(slabs, count, source, staged_partner, paged, paged_partner, true, factors);
        } else {
            load_factors<(N + 1) / 2>(segment, old_row, position, static_cast<int>(element / 2), factors);
            if (both) {
                load_factors<(N + 1) / 2>(segment, old_row, position, static_cast<int>((element + segment.partner) / 2),
                                          factors + N / 2);
            }
            move<PAIRS, Type, Access>(slabs, count, source, staged_partner, paged, paged_partner, both, factors);
        }
    }
}

// One module per element type, named by the compiler's option -DSPLICE_TYPE.
extern "C" __global__ void __launch_bounds__(THREADS, 2) splice_vectors(const __grid_constant__ Launch launch) {
    splice<SPLICE_TYPE, Vector>(launch);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) splice_elements(const __grid_constant__ Launch launch) {
    splice<SPLICE_TYPE, Element>(launch);
}
