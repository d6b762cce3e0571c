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
// zero point. Where a code's sign is set, the first table gives eight times the highest bit of a
// byte, 0, and where it is not, the second.
__device__ __forceinline__ u32 to_bytes(u32 codes) {
  return pick(0x13121110, 0x1c181614, codes) | pick(0x0d0e0f10, 0x04080a0c, codes ^ 0x8888);
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
