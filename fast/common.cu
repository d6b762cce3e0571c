// What gemv.cu, few.cu and step.cu share, which stand behind this: what PTX does, digits, gates.
// BF16: x's type, else fp16.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#ifndef CUDA_ON_CPU  // tests/fast/cuda_on_cpu.h has stand-ins

__device__ __forceinline__ unsigned char* shared_memory() {
  extern __shared__ __align__(1024) unsigned char memory[];
  return memory;
}
__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(u64* b, int n) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address(b)), "r"(n));
}
__device__ __forceinline__ void arrive(u64* b) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address(b))
               : "memory");
}
#if __CUDA_ARCH__ >= 900
#define WAIT "mbarrier.try_wait"
#else
#define WAIT "mbarrier.test_wait"
#endif
__device__ __forceinline__ void wait(u64* b, int parity) {
  asm volatile("{ .reg .pred p; AGAIN: " WAIT
               ".parity.shared.b64 p, [%0], %1; @!p bra AGAIN; }" ::"r"(address(b)),
               "r"(parity)
               : "memory");
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, u64* b) {
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1], %2, [%3], %4;" ::"r"(address(to)),
      "l"(from), "r"(bytes), "r"(address(b)), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void barriers_are_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;");
}
__device__ __forceinline__ void next_kernel_may_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
#else
__device__ __forceinline__ void barriers_are_ready() {}
__device__ __forceinline__ void next_kernel_may_start() {}
__device__ __forceinline__ void wait_for_kernel_before() {}
#endif

__device__ __forceinline__ float half_to_float(u32 bits) {
  float y;
  asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(y) : "r"(bits));
  return y;
}
__device__ __forceinline__ float number(u16 bits) {  // x's, the norm's, the bias's
  return BF16 ? __uint_as_float((u32)bits << 16) : half_to_float(bits);
}
__device__ __forceinline__ u16 rounded(float y) {
  u16 bits;
  if (BF16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(y));
  else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(y));
  return bits;
}
__device__ __forceinline__ u32 two_halves(float low, float high) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

__device__ __forceinline__ u32 pick(u32 low, u32 high, u32 selectors) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(selectors));
  return bytes;
}

__device__ __forceinline__ void imma(int (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void hmma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// A number below 2^31 as four signed digits, one a byte.
__device__ __forceinline__ u32 to_digits(int x) { return (u32)(x + 0x00808080) ^ 0x00808080u; }
// rows[i] as bytes -> columns[i], byte i of each.
__device__ __forceinline__ void transpose(const u32 (&rows)[4], u32 (&columns)[4]) {
  u32 a = __byte_perm(rows[0], rows[1], 0x5140), b = __byte_perm(rows[2], rows[3], 0x5140);
  u32 c = __byte_perm(rows[0], rows[1], 0x7362), d = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(a, b, 0x5410);
  columns[1] = __byte_perm(a, b, 0x7632);
  columns[2] = __byte_perm(c, d, 0x5410);
  columns[3] = __byte_perm(c, d, 0x7632);
}

// Four e2m1 codes, the lower half of a word, as a byte each: twice the number plus 16, which is the
// zero point. Where a code's sign is set, `above` is eight times the highest bit of a byte, 0, and
// where it is not, `below`.
__device__ __forceinline__ void to_bytes(u32 codes, u32& above, u32& below) {
  above = pick(0x13121110, 0x1c181614, codes);
  below = pick(0x0d0e0f10, 0x04080a0c, codes ^ 0x8888);
}

// Codes are multiplied as bytes by the digits of x, whose sums are exact (packed_gemv.py draws a
// unit, of two blocks). What a lane has of them, as the right operands of a unit's four products:
// b[m][register][high or low codes]. MXFP4's codes become bytes first, and instead of a nibble there
// is a half of a word. Column n below 4 has digit n of one group's inputs, and column 4 + n that of
// another's. Each is 0 where the other has its inputs, so that one accumulator keeps two groups
// apart:
//
//     SETS 1: blocks 0 and 1, which have products m 0, 1 and 2, 3
//     SETS 2: of block m / 2 the groups 0 and 1, which have the even and the odd m
//     SETS 4: of product m the inputs of registers 0 and 1
//
// digits: the lane's words, of which there are 8 where two codes share a byte or, of e4m3, terms of
// fp16 stand for digits, else 4.
template <int DIGIT_WORDS, int SETS>
struct Operands {
  u32 b[4][2][2];
  __device__ __forceinline__ Operands(const u32* digits, int lane) {
    const int half = lane >> 4;
    u32 d[4][2];
    if constexpr (DIGIT_WORDS == 8) {
      const uint4 p = *(const uint4*)digits, q = *(const uint4*)(digits + 4);
      d[0][0] = p.x, d[0][1] = p.y, d[1][0] = p.z, d[1][1] = p.w;
      d[2][0] = q.x, d[2][1] = q.y, d[3][0] = q.z, d[3][1] = q.w;
    } else {
      const uint4 p = *(const uint4*)digits;
      d[0][0] = p.x, d[1][0] = p.y, d[2][0] = p.z, d[3][0] = p.w;
    }
#pragma unroll
    for (int m = 0; m < 4; m++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int kind = 0; kind < DIGIT_WORDS / 4; kind++) {
          const int q = SETS == 1 ? (m & 1) * 2 + r : SETS == 2 ? (m >> 1) * 2 + r : m;
          const bool mine = half == (SETS == 1 ? m >> 1 : SETS == 2 ? m & 1 : r);
          b[m][r][kind] = mine ? d[q][kind] : 0;
        }
  }
};

// Where the digits of a lane's inputs of a unit lie in it, [32][DIGIT_WORDS]: word `word` of those
// of digit n.
template <int DIGIT_WORDS, int SETS>
__device__ __forceinline__ u32& digit_word(u32* digits, int lane, int n, int word) {
  const int c = lane >> 2, column = lane & 3;
  // Which half of the columns this quarter is for, and which of its four chunks.
  const int half = SETS == 1 ? c >> 2 : SETS == 2 ? c >> 1 & 1 : c & 1;
  const int q = SETS == 1 ? c & 3 : SETS == 2 ? (c >> 2) * 2 + (c & 1) : c >> 1;
  return digits[(half * 16 + n * 4 + column) * DIGIT_WORDS + q * (DIGIT_WORDS / 4) + word];
}

// A lane's inputs of a unit, which `scale` makes less than 2^26, become digits.
//
// A byte of int4 codes is low + 16 high, for inputs l and h. No code is shifted, as
// (low + 16 high) h + low (16 l - h) = 16 (low l + high h).
template <int DIGIT_WORDS, int SETS, bool FP4, int INPUTS>
__device__ __forceinline__ void put_digits(u32* digits, const float (&v)[INPUTS], float scale,
                                           int lane) {
  constexpr int KINDS = DIGIT_WORDS / 4;
  int x[KINDS][4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    if constexpr (KINDS == 1) {
      x[0][j] = __float2int_rn(v[j] * scale);
    } else {  // byte j of a word has the codes of v[i] and v[i + 2]
      const int i = (j & 1) * 4 + (j >> 1);
      x[0][j] = __float2int_rn(v[FP4 ? 2 * j : i + 2] * scale);
      x[1][j] = FP4 ? __float2int_rn(v[2 * j + 1] * scale)
                    : 16 * __float2int_rn(v[i] * scale) - x[0][j];
    }
  }
#pragma unroll
  for (int kind = 0; kind < KINDS; kind++) {
    u32 rows[4], d[4];
#pragma unroll
    for (int j = 0; j < 4; j++) rows[j] = to_digits(x[kind][j]);
    transpose(rows, d);
#pragma unroll
    for (int n = 0; n < 4; n++) digit_word<DIGIT_WORDS, SETS>(digits, lane, n, kind) = d[n];
  }
}

// c + d += four words of 16 rows times the digits of their inputs. Products for c need not wait for
// those for d; they may be the same.
template <int DIGIT_WORDS, bool FP4>
__device__ __forceinline__ void add_products(int (&c)[4], int (&d)[4], const u32 (&a)[4],
                                             const u32 (&b)[2][2]) {
  if constexpr (FP4) {
#pragma unroll
    for (int kind = 0; kind < 2; kind++) {
      // Each has its own product, as the tensor cores have more time than what would join them.
      u32 above[4], below[4];
#pragma unroll
      for (int i = 0; i < 4; i++) to_bytes(a[i] >> 16 * kind, above[i], below[i]);
      imma(c, above, b[0][kind], b[1][kind]);
      imma(d, below, b[0][kind], b[1][kind]);
    }
  } else {
    imma(c, a, b[0][0], b[1][0]);
    if constexpr (DIGIT_WORDS == 8) {
      const u32 low[4] = {a[0] & 0x0f0f0f0fu, a[1] & 0x0f0f0f0fu, a[2] & 0x0f0f0f0fu,
                          a[3] & 0x0f0f0f0fu};
      imma(d, low, b[0][1], b[1][1]);
    }
  }
}

// Like put_digits(), for e4m3's numbers: a lane's inputs become fp16, which `scale` makes less than
// 2^14. Column n has the n-th of TERMS terms, each what those before it leave, and word `pair` inputs
// 2 pair and 2 pair + 1.
template <int DIGIT_WORDS, int SETS, int TERMS, int INPUTS>
__device__ __forceinline__ void put_fp16_terms(u32* digits, const float (&v)[INPUTS], float scale,
                                           int lane) {
#pragma unroll
  for (int pair = 0; pair < 2; pair++) {
    float low = v[2 * pair] * scale, high = v[2 * pair + 1] * scale;
#pragma unroll
    for (int n = 0; n < 4; n++) {
      u32& term = digit_word<DIGIT_WORDS, SETS>(digits, lane, n, pair);
      term = n < TERMS ? two_halves(low, high) : 0;
      low -= half_to_float(term & 0xFFFF);
      high -= half_to_float(term >> 16);
    }
  }
}
// A word of four e4m3 codes as two pairs of fp16, 2^-8 times the numbers (see layout.py).
__device__ __forceinline__ void e4m3_to_fp16(u32 word, u32& first, u32& second) {
  first = word & 0xbf80bf80u;
  second = word << 7 & 0x3f803f80u | word << 1 & 0x80008000u;
}

// What a lane sums up of four words of 16 rows, and the number that two columns of it make.
template <int DIGIT_WORDS, bool FP4>
struct IntegerSums {
  typedef int Type;
  static __device__ __forceinline__ void add(int (&c)[4], int (&d)[4], const u32 (&a)[4],
                                             const u32 (&b)[2][2]) {
    add_products<DIGIT_WORDS, FP4>(c, d, a, b);
  }
  // A unit's sums are below 2^23.
  static __device__ __forceinline__ float value(int first, int second) {
    return (float)(first + 256 * second);
  }
};
struct Fp16Sums {
  typedef float Type;
  static __device__ __forceinline__ void add(float (&c)[4], float (&d)[4], const u32 (&a)[4],
                                             const u32 (&b)[2][2]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      u32 w[4];
      e4m3_to_fp16(a[2 * r], w[0], w[2]);
      e4m3_to_fp16(a[2 * r + 1], w[1], w[3]);
      hmma(r ? d : c, w, b[r][0], b[r][1]);
    }
  }
  static __device__ __forceinline__ float value(float first, float second) { return first + second; }
};
template <bool FP8, int DIGIT_WORDS, bool FP4> struct SumOf {
  typedef IntegerSums<DIGIT_WORDS, FP4> Type;
};
template <int DIGIT_WORDS, bool FP4> struct SumOf<true, DIGIT_WORDS, FP4> { typedef Fp16Sums Type; };

// The i-th scale here, and the zero point if it stands beside it: fp16 and 16 bits, else fp32 or, of
// MXFP4, the exponent's byte.
template <bool BYTES, bool FLOATS>
__device__ __forceinline__ void group_of(const void* here, long long i, float& scale, float& zero) {
  if (BYTES) {
    const u32 exponent = ((const unsigned char*)here)[i];
    scale = __uint_as_float(max(exponent << 23, 1u << 22));
    return;
  }
  const u32 word = ((const u32*)here)[i];
  if (FLOATS) {
    scale = __uint_as_float(word);
  } else {
    scale = half_to_float(word & 0xFFFF);
    zero = (float)(word >> 16);
  }
}

// model.Gate. KIND 1: SiLU, 2: GELU by tanh, 3: MoEConfig.clamp's.
template <int KIND>
__device__ __forceinline__ float gated(float gate, float up, float limit, float alpha) {
  if (KIND == 3) {
    gate = fminf(gate, limit);
    return __fdividef(gate, 1 + __expf(-alpha * gate)) * (fminf(fmaxf(up, -limit), limit) + 1);
  }
  const float z = KIND == 2 ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return __fdividef(gate, 1 + __expf(-z)) * up;
}
