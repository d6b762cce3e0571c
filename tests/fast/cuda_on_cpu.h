// Runs gemv.cu, few.cu and step.cu on a CPU: a thread for each of its threads, and stand-ins for
// what PTX does. Where lanes exchange values, the 32 threads of a warp meet.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
using std::max;
using std::min;
struct int4 {
  int x, y, z, w;
};
struct uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct uint2 {
  unsigned x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
struct Warp {
  std::barrier<> all{32};
  unsigned values[32][6];
};
struct Running {
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<std::barrier<>>> teams;
  std::unique_ptr<std::barrier<>> all;
  int rank;
  std::vector<unsigned char*>* memories;
  std::barrier<>* cluster;
  std::atomic<bool> any{false};
};
thread_local struct {
  int x;
} threadIdx, blockIdx, gridDim;
thread_local Running* program;
thread_local unsigned char* shared;
inline unsigned char* shared_memory() { return shared; }
inline Warp& warp() { return *program->warps[threadIdx.x / 32]; }
inline void __syncwarp() { warp().all.arrive_and_wait(); }
inline void __syncthreads() { program->all->arrive_and_wait(); }
inline void meet(int team) { program->teams[team]->arrive_and_wait(); }
template <class T> T from_lane(T value, int lane) {
  memcpy(warp().values[threadIdx.x % 32], &value, 4);
  __syncwarp();
  memcpy(&value, warp().values[lane], 4);
  __syncwarp();
  return value;
}
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) {
  return from_lane(value, threadIdx.x % 32 ^ mask);
}
template <class T> T __shfl_down_sync(unsigned, T value, int n) {
  return from_lane(value, min<int>(threadIdx.x % 32 + n, 31));
}
template <class T> T __shfl_sync(unsigned, T value, int lane) { return from_lane(value, lane); }
template <class T> T __reduce_max_sync(unsigned, T value) {
  for (int mask = 16; mask; mask /= 2) value = std::max(value, __shfl_xor_sync(0, value, mask));
  return value;
}
inline float __uint_as_float(unsigned bits) {
  float y;
  memcpy(&y, &bits, 4);
  return y;
}
inline unsigned __float_as_uint(float y) {
  unsigned bits;
  memcpy(&bits, &y, 4);
  return bits;
}
inline int __float2int_rn(float y) { return (int)nearbyintf(y); }
inline float __expf(float y) { return expf(y); }
inline float __fdividef(float y, float z) { return y / z; }
inline float rsqrtf(float y) { return 1 / sqrtf(y); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selectors) {
  uint64_t bytes = (uint64_t)high << 32 | low;
  unsigned y = 0;
  for (int i = 0; i < 4; i++) y |= (unsigned)(bytes >> 8 * (selectors >> 4 * i & 7) & 255) << 8 * i;
  return y;
}

inline unsigned pick(unsigned low, unsigned high, unsigned selectors) {  // prmt
  unsigned y = 0;
  for (int i = 0; i < 4; i++) {
    unsigned selector = selectors >> 4 * i & 15, byte = __byte_perm(low, high, selector) & 255;
    y |= (selector & 8 ? byte & 128 ? 255 : 0 : byte) << 8 * i;
  }
  return y;
}

// mbarriers: a barrier's eight bytes in shared memory are a pointer to one of these
struct Mbarrier {
  int count, missing, bytes = 0, phase = 0;
  std::mutex mutex;
  std::condition_variable changed;
};
inline void arrive(unsigned long long* b, int bytes = 0, int threads = 1) {
  Mbarrier* m = (Mbarrier*)*b;
  std::lock_guard lock(m->mutex);
  m->missing -= threads;
  m->bytes += bytes;
  if (m->missing || m->bytes) return;
  m->missing = m->count;
  m->phase ^= 1;
  m->changed.notify_all();
}
inline void init(unsigned long long* b, int count) {
  Mbarrier* m = new Mbarrier;
  m->count = m->missing = count;
  *b = (unsigned long long)m;
}
inline void wait(unsigned long long* b, int parity) {
  Mbarrier* m = (Mbarrier*)*b;
  std::unique_lock lock(m->mutex);
  // A wait that has no end is the end of the process.
  if (!m->changed.wait_for(lock, std::chrono::minutes(2), [&] { return m->phase != parity; }))
    abort();
}
constexpr int FEEDERS = 1;
inline void copy(void* to, const void* from, int bytes, unsigned long long* b) {
  // As cp.async.bulk wants them.
  if ((uintptr_t)to % 16 || (uintptr_t)from % 16 || bytes % 16) abort();
  memcpy(to, from, bytes);
  arrive(b, -bytes, 0);
}
inline void feed(void* slot, const void* codes, int bytes, void* slot_scales, const void* scales,
                 int scale_bytes, unsigned long long* b, int) {
  arrive(b, bytes + scale_bytes, 0);
  copy(slot, codes, bytes, b);
  if (scale_bytes) copy(slot_scales, scales, scale_bytes, b);
}
inline void fed(unsigned long long* b) { arrive(b); }
inline void barriers_are_ready() {}
inline void next_kernel_may_start() {}
inline void wait_for_kernel_before() {}

inline float half_to_float(unsigned bits) {
  _Float16 y;
  memcpy(&y, &bits, 2);
  return y;
}
inline unsigned short half_bits(float y) {
  _Float16 h = y;
  unsigned short bits;
  memcpy(&bits, &h, 2);
  return bits;
}
inline float number(unsigned short bits) {
  return BF16 ? __uint_as_float((unsigned)bits << 16) : half_to_float(bits);
}
inline unsigned short rounded(float y) {
  unsigned bits = __float_as_uint(y);
  return BF16 ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : half_bits(y);
}
inline unsigned two_halves(float low, float high) { return half_bits(high) << 16 | half_bits(low); }

// PTX ISA, "Matrix fragments for mma.m16n8k32" and, of 16 bits, "mma.m16n8k16": each a word of each
// lane
template <class T, class F>
void multiply(T (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, F dot) {
  unsigned all[32][6], mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(warp().values[threadIdx.x % 32], mine, sizeof mine);
  __syncwarp();
  memcpy(all, warp().values, sizeof all);
  __syncwarp();
  const int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int i = 0; i < 4; i++)
    for (int t = 0; t < 4; t++)
      for (int half = 0; half < 2; half++)
        c[i] += dot(all[row * 4 + t][half * 2 + i / 2], all[(column + i % 2) * 4 + t][4 + half]);
}
inline void imma(int (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply(c, a, b0, b1, [](unsigned x, unsigned y) {
    int sum = 0;
    for (int at = 0; at < 32; at += 8) sum += (int)(x >> at & 255) * (int8_t)(y >> at);
    return sum;
  });
}
inline void hmma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply(c, a, b0, b1, [](unsigned x, unsigned y) {
    return half_to_float(x & 0xFFFF) * half_to_float(y & 0xFFFF) +
           half_to_float(x >> 16) * half_to_float(y >> 16);
  });
}

// Clusters
#ifndef CLUSTER
#define CLUSTER 1
#endif
inline int cluster_rank() { return program->rank; }
template <class T> T* address_in(T* p, int rank) {
  return (T*)((unsigned char*)p - shared + (*program->memories)[rank]);
}
template <class T> void send(T* p, T y, unsigned long long* b, int rank) {
  *address_in(p, rank) = y;
  arrive(address_in(b, rank), -(int)sizeof y, 0);
}
inline void expect(unsigned long long* b, int bytes) { arrive(b, bytes, 0); }
inline void meet_all() { program->cluster->arrive_and_wait(); }

// Runs `kernel` in programs, a cluster of them at a time. -> whether they stayed within their
// shared memory
template <class Kernel>
bool run_programs(int programs, int threads, int shared_bytes, Kernel kernel) {
  bool inside = true;
  for (int first = 0; first < programs; first += CLUSTER) {
    std::vector<Running> running(CLUSTER);
    std::vector<unsigned char*> memories;
    std::vector<std::thread> started;
    std::barrier<> cluster(threads * CLUSTER);
    for (int rank = 0; rank < CLUSTER; rank++) {
      Running& p = running[rank];
      p.rank = rank;
      p.memories = &memories;
      p.cluster = &cluster;
      p.all = std::make_unique<std::barrier<>>(threads);
      for (int w = 0; w < threads / 32; w++) p.warps.push_back(std::make_unique<Warp>());
      for (int t = 0; t < threads / 32 / (WIDTH + 1); t++)
        p.teams.push_back(std::make_unique<std::barrier<>>(WIDTH * 32));
      memories.push_back((unsigned char*)aligned_alloc(1024, (shared_bytes + 1151) / 1024 * 1024));
      memset(memories[rank], 0xAA, shared_bytes + 128);
    }
    for (int rank = 0; rank < CLUSTER; rank++)
      for (int i = 0; i < threads; i++)
        started.emplace_back([=, &running, &memories] {
          threadIdx.x = i;
          blockIdx.x = first + rank;
          gridDim.x = programs;
          program = &running[rank];
          shared = memories[rank];
          kernel();
        });
    for (auto& thread : started) thread.join();
    for (unsigned char* memory : memories) {
      inside &= std::all_of(memory + shared_bytes, memory + shared_bytes + 128,
                            [](unsigned char byte) { return byte == 0xAA; });
      free(memory);
    }
  }
  return inside;
}

// step.cu
inline unsigned long long peek(const unsigned long long* p) {
  return std::atomic_ref(*(unsigned long long*)p).load(std::memory_order_relaxed);
}
inline void poke(unsigned long long* p, unsigned long long y) {
  std::atomic_ref(*p).store(y, std::memory_order_relaxed);
}
inline unsigned long long peek_across(const unsigned long long* p) { return peek(p); }
inline void poke_across(unsigned long long* p, unsigned long long y) { poke(p, y); }
inline unsigned long long atomicAdd(unsigned long long* p, unsigned long long y) {
  return std::atomic_ref(*p).fetch_add(y);
}
inline void expect_and_arrive(unsigned long long* b, int bytes) { arrive(b, bytes); }
inline void meet() { meet(0); }
inline bool meet_any(bool mine) {
  if (mine) program->any = true;
  meet();
  const bool any = program->any;
  meet();
  program->any = false;
  meet();
  return any;
}
inline void copy_word(unsigned long long* to, const unsigned long long* from) { *to = *from; }
inline void wait_for_copies() {}
// A copy of a box, at once or, where LATE is defined, within so many milliseconds, in any order.
template <class Copy> void land(Copy copy) {
#ifdef LATE
  static std::atomic<unsigned> copies{1};
  const unsigned n = copies++ * 2654435761u >> 8;
  std::thread([=] {
    std::this_thread::sleep_for(std::chrono::milliseconds(n % LATE));
    copy();
  }).detach();
#else
  copy();
#endif
}
// What nvrtc.tensor_map() describes; 16 bytes are at another place in each row of 128.
inline void copy_box(void* to, const void* map, int row, int y, int z, unsigned long long* b) {
  const unsigned char* from = *(const unsigned char* const*)map;
  const long long *sizes = (const long long*)map + 1, *strides = sizes + 5, *box = strides + 4;
  if (box[0] != 64 || box[4] != 1 || (uintptr_t)to % 1024) abort();
  land([=] {
    unsigned char* out = (unsigned char*)to;
    for (int n = 0; n < box[3]; n++)
      for (int h = 0; h < box[2]; h++)
        for (int r = 0; r < box[1]; r++, out += 128) {
          const long long at[5] = {0, row + r, h, y + n, z};
          const unsigned char* source = from;
          bool inside = true;
          for (int i = 1; i < 5; i++) inside &= at[i] < sizes[i], source += at[i] * strides[i - 1];
          for (int part = 0; part < 8; part++) {
            unsigned char* place = out + (part ^ (uintptr_t)out >> 7 & 7) * 16;
            if (inside) memcpy(place, source + part * 16, 16);
            else memset(place, 0, 16);
          }
        }
    arrive(b, -(int)(out - (unsigned char*)to), 0);
  });
}
inline void prefetch_map(const void*) {}
inline void forget_map(const void*) {}
inline void arrive_for(unsigned long long* b, int warps) { arrive(b, 0, warps); }
inline int __reduce_add_sync(unsigned, int value) {
  for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(0, value, mask);
  return value;
}
inline unsigned __ballot_sync(unsigned, bool mine) {
  return __reduce_add_sync(0, mine ? 1 << threadIdx.x % 32 : 0);
}
inline int __ffs(unsigned bits) { return __builtin_ffs(bits); }
inline int thread_number() { return threadIdx.x; }
inline void give_up() { abort(); }
// Each lane waits for its own words, and leaves the processor to the others meanwhile.
inline bool all_there(bool mine) {
  if (!mine) std::this_thread::sleep_for(std::chrono::microseconds(3000));
  return mine;
}
inline void wait_for(const volatile int& number, int value) {
  while (number != value) std::this_thread::sleep_for(std::chrono::microseconds(100));
}
inline void peek_two(const unsigned long long* p, unsigned long long (&y)[2]) {
  y[0] = peek(p), y[1] = peek(p + 1);
}
inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  multiply(c, a, b0, b1, [](unsigned x, unsigned y) {
    return number(x) * number(y) + number(x >> 16) * number(y >> 16);
  });
}
inline unsigned transposed(unsigned pair) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  unsigned y = 0;
  for (int source = 0; source < 32; source++) {
    const unsigned other = from_lane(pair, source);
    for (int j = 0; j < 2; j++)
      if (source / 4 == 2 * t + j && source % 4 == g / 2)
        y |= (other >> g % 2 * 16 & 0xFFFF) << 16 * j;
  }
  return y;
}

typedef const unsigned short* Numbers;
typedef const unsigned char* Bytes;
#ifdef STEP
typedef unsigned long long* Words;
extern "C" void whole_step(Numbers, const long long*, unsigned short*, const unsigned long long*,
                           Words, Words, Words, Words, Words, Words, Words, Words,
                           const unsigned long long*, float, float,
                           float, float, float, float);
extern "C" bool run(int programs, int threads, int shared_bytes, Numbers x,
                    const long long* positions, unsigned short* y, const unsigned long long* layers,
                    Words started, Words qkv, Words split_sums, Words attended, Words middle,
                    Words logits, Words gated, Words ends, const unsigned long long* rank_words,
                    float eps, float qk_eps, float scale, float expert_scale, float limit,
                    float alpha) {
  return run_programs(programs, threads, shared_bytes, [=] {
    whole_step(x, positions, y, layers, started, qkv, split_sums, attended, middle, logits, gated, ends,
               rank_words, eps, qk_eps, scale, expert_scale, limit, alpha);
  });
}
#elif defined(FEW)
extern "C" void few(Numbers, Bytes, Bytes, Numbers, Numbers, Numbers, unsigned short*, int, int,
                    int, float);
extern "C" bool run(int programs, int threads, int shared_bytes, Numbers x, Bytes codes,
                    Bytes scales, Numbers norm, Numbers bias, Numbers residual, unsigned short* out,
                    int M, int n_out, int tiles, float eps) {
  return run_programs(programs, threads, shared_bytes, [=] {
    few(x, codes, scales, norm, bias, residual, out, M, n_out, tiles, eps);
  });
}
#else
#if FLOAT_NORM
typedef const float* Norms;
#else
typedef Numbers Norms;
#endif
extern "C" void gemv(Numbers, Bytes, Bytes, const long long*, Norms, Numbers, Numbers, const int*,
                     const float*, unsigned short*, int, int, float, float, float);
extern "C" bool run(int programs, int threads, int shared_bytes, Numbers x, Bytes codes,
                    Bytes scales, const long long* perm, Norms norm, Numbers bias,
                    Numbers residual, const int* active, const float* weights, unsigned short* out,
                    int n_out, int tiles, float eps, float limit, float alpha) {
  return run_programs(programs, threads, shared_bytes, [=] {
    gemv(x, codes, scales, perm, norm, bias, residual, active, weights, out, n_out, tiles, eps,
         limit, alpha);
  });
}
#endif
