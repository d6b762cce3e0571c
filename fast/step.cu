// All layers of a decode step of one row in one launch. step.py has the words and the drawing, and
// writes the table that stands in front of this: BF16, D, LAYERS, HEADS, KV_HEADS, HEAD_DIM,
// QK_NORM, FLOAT_QK_NORM, SINKS, BEHIND, CHOSEN, NORMALIZE, WARPS, PROGRAMS, MEMORY, IN_FLIGHT,
// IN_FLIGHT_WAITING, TRIES, and a struct for each product: Qkv, Wo, Up, Down and, of a mixture,
// RouterOp.

constexpr int SQUAD_WARPS = 8, SQUADS = WARPS / SQUAD_WARPS;  // warps that share a slot
constexpr int LARGEST_SPLITS = 32;  // programs that share the slots of a kv head
constexpr float LOG2_E = 1.4426950408889634f;

#ifndef CUDA_ON_CPU

#if BF16
#define X_TYPE "bf16"
#else
#define X_TYPE "f16"
#endif
// Words of 64 bits come and go as one, and nothing else is published by them: relaxed is enough. Of
// two in one load each is one by itself.
__device__ __forceinline__ u64 peek(const u64* p) {
  u64 y;
  asm volatile("ld.relaxed.gpu.b64 %0, [%1];" : "=l"(y) : "l"(p) : "memory");
  return y;
}
__device__ __forceinline__ void peek_two(const u64* p, u64 (&y)[2]) {
  asm volatile("ld.relaxed.gpu.v2.b64 {%0, %1}, [%2];"
               : "=l"(y[0]), "=l"(y[1])
               : "l"(p)
               : "memory");
}
__device__ __forceinline__ void poke(u64* p, u64 y) {
  asm volatile("st.relaxed.gpu.b64 [%0], %1;" ::"l"(p), "l"(y) : "memory");
}
__device__ __forceinline__ void expect_and_arrive(u64* b, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(address(b)), "r"(bytes)
               : "memory");
}
// The thread's number, read anew: else the compiler computes the places of all products once, keeps
// them in registers over all layers, and spills others for it.
__device__ __forceinline__ int thread_number() {
  int n;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(n));
  return n;
}
__device__ __forceinline__ void meet() {  // all warps but the producer
  asm volatile("bar.sync 1, %0;" ::"n"(WARPS * 32) : "memory");
}
__device__ __forceinline__ bool meet_any(bool mine) {  // whether it is so for any thread of theirs
  int any;
  asm volatile("{ .reg .pred p, q; setp.ne.s32 p, %1, 0; bar.red.or.pred q, 1, %2, p; "
               "selp.s32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"((int)mine), "n"(WARPS * 32)
               : "memory");
  return any;
}
// Eight bytes into shared memory, there once this thread has waited for its copies.
__device__ __forceinline__ void copy_word(u64* to, const u64* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address(to)), "l"(from) : "memory");
}
// A box of 16-bit numbers, as Step.maps_of() in step.py describes it, from a row on; y and z: unit
// and expert of weights, kv head and columns of a cache.
__device__ __forceinline__ void copy_box(void* to, const void* map, int row, int y, int z, u64* b) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3, %2, %4, %5}], [%6];" ::"r"(address(to)),
      "l"(map), "r"(0), "r"(row), "r"(y), "r"(z), "r"(address(b))
      : "memory");
}
__device__ __forceinline__ void arrive_for(u64* b, int warps) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], %1; }" ::"r"(address(b)),
               "r"(warps)
               : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// Another map may have been at the same address, and be remembered (CUDA Programming Guide, "Using
// TMA to transfer multi-dimensional arrays").
__device__ __forceinline__ void forget_map(const void* map) {
  asm volatile("fence.proxy.tensormap::generic.acquire.sys [%0], 128;" ::"l"(map) : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ bool all_there(bool mine) { return __all_sync(~0u, mine); }
__device__ __forceinline__ void wait_for(const volatile int& number, int value) {
  while (number != value) {
  }
}
__device__ __forceinline__ void give_up() { asm volatile("trap;"); }
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." X_TYPE "." X_TYPE
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Of an 8 x 8 matrix a lane 4 g + t has elements 2 t and 2 t + 1 of row g; -> of column g.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(pair));
  return y;
}

#endif

// Of groups of LANES neighbours, each by itself.
template <int LANES = 32>
__device__ __forceinline__ float all_lanes(float y, float (*join)(float, float)) {
#pragma unroll
  for (int o = LANES / 2; o; o >>= 1) y = join(y, __shfl_xor_sync(~0u, y, o));
  return y;
}
__device__ __forceinline__ float add(float x, float y) { return x + y; }
__device__ __forceinline__ float sum_of(const float* x, int n, int lane) {
  float sum = 0;
  for (int i = lane; i < n; i += 32) sum += x[i];
  return all_lanes(sum, add);
}
__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ float low_number(u32 pair) { return number(pair & 0xFFFF); }
__device__ __forceinline__ float high_number(u32 pair) { return number(pair >> 16); }
__device__ __forceinline__ u32 pair_of(float low, float high) {
  return (u32)rounded(low) | (u32)rounded(high) << 16;
}

// Words: what one program computes and others read. The high half is a tag, another one in each
// layer and step, so that a word tells by itself whether it is there: no fence, nothing to clear.
__device__ __forceinline__ u64 word_of(u32 value, u32 tag) { return (u64)tag << 32 | value; }

// Waits for words at p + at[i] with this tag, and keeps their values. All lanes of a warp call this
// together; at[i] < 0: this lane wants none. What never comes ends in a trap, after which the process
// can use the GPU no longer.
template <int N>
__device__ __forceinline__ void await(u32 (&values)[N], const u64* p, const int (&at)[N], u32 tag) {
  for (int tries = 0;; tries++) {
    bool there = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u64 word = at[i] < 0 ? word_of(0, tag) : peek(p + at[i]);
      values[i] = (u32)word;
      there &= (u32)(word >> 32) == tag;
    }
    if (all_there(there)) return;
    if (tries > TRIES) give_up();
  }
}

// A layer's numbers in memory, 8 bytes each, in this order: Step.fields() in step.py writes them.
// CODES: of 16-bit weights the address of their tensor map; of the router the weights. NORM_WEIGHT:
// of Wo and Down, if BEHIND, of the norm behind them.
enum { CODES, SCALES, NORM_WEIGHT, BIASES, PER_PRODUCT };
enum { QKV, WO, ROUTER, UP, DOWN, PRODUCTS };
enum {
  K_CACHE = PRODUCTS * PER_PRODUCT,
  V_CACHE,
  Q_NORM,
  K_NORM,
  SINK,
  COS,
  SIN,
  LENGTH_AND_WINDOW,  // the cache's slots in the high half
  K_MAP,
  V_MAP,
  FIELDS
};
static_assert(FIELDS <= 32, "a lane copies one");

struct Layer {
  const u64* fields;  // in shared memory
  template <class T>
  __device__ __forceinline__ T* at(int field) const {
    return (T*)fields[field];
  }
};

template <bool>
struct NumberOf {
  typedef u16 Type;
};
template <>
struct NumberOf<true> {
  typedef float Type;
};
__device__ __forceinline__ float any_number(u16 bits) { return number(bits); }
__device__ __forceinline__ float any_number(float x) { return x; }

constexpr int divisor(int x, int y) { return y ? divisor(y, x % y) : x; }  // the greatest of both

// What follows from a product's struct O: BITS, E2M1, K, N (of its outputs), GROUP (0: one a row),
// PARTS, FLOAT_SCALES, GATED (1: SiLU, 2: GELU by tanh, 3: MoEConfig.clamp's), EXPERTS, NORM,
// FLOAT_NORM, BIAS and RESIDUAL.
//
// As in gemv.cu a block is 1 KiB of 16 rows, BLOCK inputs wide, and a chunk has the scales of 16
// rows for PER_CHUNK blocks. A unit is two blocks, what a warp multiplies at once. SUMMED is Down
// of a mixture: its row is the chosen experts' rows one behind the other. SETS: groups of inputs in
// a block, each with a sum of its own. TILES: of 16 rows of w, 8 of either half if GATED; ALL: of
// all chosen experts. Of Qwen3-30B-A3B in int4, groups of 128: Up has K 2048, 8 units a row, 96
// tiles an expert and 768 in all; Down has K 768, 3 units a row, 24 in a row of all experts, and
// 128 tiles.
template <class O>
struct Sizes {
  static constexpr bool PLAIN = O::BITS == 16, GROUPED = O::GROUP > 0;
  static constexpr int BLOCK = 512 / O::BITS, BLOCKS = (O::K + BLOCK - 1) / BLOCK;
  static constexpr int PER_CHUNK = O::GROUP > BLOCK ? O::GROUP / BLOCK : 1;
  static constexpr int CHUNKS = GROUPED ? (BLOCKS + PER_CHUNK - 1) / PER_CHUNK : 1;
  static constexpr bool BYTE_SCALES = O::E2M1 && !O::FLOAT_SCALES;
  static constexpr int CHUNK_BYTES = (BYTE_SCALES ? 16 : 64) * O::PARTS;
  static constexpr int UNIT_INPUTS = 2 * BLOCK, ROW_UNITS = (BLOCKS + 1) / 2;
  static constexpr bool SUMMED = O::EXPERTS && !O::GATED;
  static constexpr int UNITS = ROW_UNITS * (SUMMED ? O::EXPERTS : 1);
  static constexpr int TILE_SLOTS = (UNITS + SQUAD_WARPS - 1) / SQUAD_WARPS;  // of the ring
  static constexpr int UNIT_CHUNKS = PER_CHUNK > 1 ? 1 : 2;
  // If PLAIN: neighbours that one copy takes, as they belong to the same row.
  static constexpr int COPY_UNITS = SUMMED ? divisor(ROW_UNITS, SQUAD_WARPS) : SQUAD_WARPS;
  static constexpr int CODE_BYTES = SQUAD_WARPS * 2048;
  static constexpr int SLOT =
      CODE_BYTES +
      (GROUPED && !PLAIN ? (SQUAD_WARPS * UNIT_CHUNKS + (PER_CHUNK > 1)) * CHUNK_BYTES : 0);
  // Of a unit of x a lane has so many inputs, which become so many words of digits.
  static constexpr int INPUTS = PLAIN ? 2 : O::BITS == 4 ? 8 : 4;
  static constexpr int DIGIT_WORDS = PLAIN ? 3 : O::BITS == 4 ? 8 : 4;
  static constexpr int SETS = PLAIN ? 1 : O::PARTS;
  static constexpr int TILES = (O::N + (O::GATED ? 7 : 15)) / (O::GATED ? 8 : 16);  // of an expert
  static constexpr int ALL = TILES * (O::EXPERTS && O::GATED ? O::EXPERTS : 1);
};
constexpr int largest(int x, int y) { return x > y ? x : y; }
constexpr int smallest(int x, int y) { return x < y ? x : y; }
template <template <class> class F, class O, class... More>
constexpr int largest_of() {
  if constexpr (sizeof...(More) > 0) return largest(F<O>::value, largest_of<F, More...>());
  else return F<O>::value;
}
template <class O> struct SlotBytes { static constexpr int value = Sizes<O>::SLOT; };
template <class O> struct UnitsOf { static constexpr int value = Sizes<O>::UNITS; };
template <class O> struct DigitBytes {
  static constexpr int value = Sizes<O>::UNITS * 128 * Sizes<O>::DIGIT_WORDS;
};
template <class O> struct TilesHere {
  static constexpr int value = (Sizes<O>::ALL + PROGRAMS - 1) / PROGRAMS;
};
#define OPERATIONS Qkv, Wo, Up, Down
// Whether a program has any of an expert's rows.
#define CHOOSES (share_of(largest(Sizes<Up>::ALL, Sizes<Down>::ALL)) > 0)
// Whether a program needs the stream: one with neither tiles of Qkv nor of Up must not read words,
// as nobody would wait until it has.
constexpr int OF_STREAM = largest(Sizes<Qkv>::ALL, Sizes<Up>::ALL);
#define KEEPS_STREAM (OF_STREAM >= PROGRAMS || share_of(OF_STREAM) > 0)
constexpr int SLOT = (largest_of<SlotBytes, OPERATIONS>() + 1023) / 1024 * 1024;
static_assert(SLOT >= 16 * 1024);  // of the cache there is no more
constexpr int MOST_UNITS = largest_of<UnitsOf, OPERATIONS>();
constexpr int MOST_TILES = largest_of<TilesHere, OPERATIONS>();
constexpr int QUERIES = HEADS / KV_HEADS;  // of a kv head
// A head's values are parts of 64 columns, of which attention's tasks have one or, of longer texts,
// WIDE. What a slot of the ring has of the cache: rows, which 16 of them a warp takes, and bytes of
// their keys and of a part of their values.
constexpr int COLUMNS = 64, COLUMN_PARTS = HEAD_DIM / COLUMNS, WIDE = smallest(2, COLUMN_PARTS);
constexpr int CACHE_ROWS = 4096 / HEAD_DIM, SLOT_TILES = CACHE_ROWS / 16;
constexpr int KEY_BYTES = CACHE_ROWS * HEAD_DIM * 2, VALUE_BYTES = CACHE_ROWS * COLUMNS * 2;
constexpr int PASS = 16 * WARPS;  // slots of the cache that all warps have at once
// A box lies in rows of 128 bytes, and 16-byte part i of a row at place i ^ row % 8
// (CU_TENSOR_MAP_SWIZZLE_128B). Eight lanes that read at once have the same four parts of two rows:
// in rows that differ in bit 2 these lie in different banks, and far_apart() orders rows so.
__device__ __forceinline__ int far_apart(int row) { return row ^ (row & 1) << 2; }
__device__ __forceinline__ uint4 part_of(const unsigned char* box, int row, int part) {
  return *(const uint4*)(box + row * 128 + ((part ^ row) & 7) * 16);
}

// A program's shared memory but for the ring.
struct Shared {
  alignas(16) unsigned char inputs[largest_of<DigitBytes, OPERATIONS>()];
  alignas(16) float sums[MOST_UNITS][4][4];  // of x, as the digits' columns have them
  float scale[MOST_UNITS];  // what a unit's digits count
  float offset[MOST_UNITS], squares[MOST_UNITS];
  float branch_squares[BEHIND ? MOST_UNITS : 1];
  alignas(16) u16 stream[BEHIND ? D : 8];  // if BEHIND and KEEPS_STREAM, all of the residual stream
  float all_offsets, factor;  // of a product's units; the norm's
  float entering;             // the mean of the squares of what enters a layer, plus eps
  float partial[MOST_TILES][WARPS][16];
  // The residual stream of this program's tiles, over all layers: Wo and Down have the same tiles.
  alignas(16) float residual[TilesHere<Wo>::value][16];
  alignas(16) float attended[WARPS][QUERIES][64 + 4];  // 4 for the banks' sake
  alignas(16) u16 q[QUERIES][HEAD_DIM], k[HEAD_DIM], v[HEAD_DIM];
  float largest[QUERIES][WARPS], total[QUERIES][WARPS];
  int experts[32];
  float weights[32];
#if CHOSEN
  u64 before[RouterOp::N + 1];  // its sums, as the layer before left them
  alignas(16) int keys[(RouterOp::N + 31) / 32 * 32];  // ordered as the logits are
#endif
  u32 tag;
  int odd;                 // whether the step's number is
  int is_first;            // whether the step is the first of its model
  volatile int streaming;  // whether this program's warps multiply
  u64 full[32], empty[32], chosen;
  volatile int held[32];  // of each place of the ring, the number of the slot that has it
  u64 fields[2][2][FIELDS];  // the producer's, and the others'; of layers with even and odd numbers
};
constexpr int STAGES = (MEMORY - (int)sizeof(Shared) - 256) / SLOT < 32
                           ? (MEMORY - (int)sizeof(Shared) - 256) / SLOT
                           : 32;
// A barrier's parity tells the n-th use of a place of the ring from the next use, but not from the
// one behind that. So the use before must have landed when a squad begins to wait for slot n, which
// is that of slot n - STAGES. The squad had a slot from n - 2 * SQUADS on (AT_ONCE is 2), and when
// that was asked for, all but IN_FLIGHT - 1 of the slots before it had landed.
static_assert(STAGES >= 2 * SQUADS + IN_FLIGHT, "the ring does not fit in shared memory");
static_assert(HEAD_DIM % 64 == 0 && QUERIES <= 8 && LARGEST_SPLITS % WARPS == 0);

struct Program {  // as a warp sees it
  Shared* s;
  unsigned char* ring;
  int warp, lane;
  int next_slot;  // of the ring, counted from the launch on: the first of the next product
  float eps, limit, alpha;  // of norms; of a gate with MoEConfig.clamp
  __device__ __forceinline__ void reload_ids() {
    const int n = thread_number();
    warp = n / 32;
    lane = n % 32;
  }
  __device__ __forceinline__ unsigned char* slot(int at) const { return ring + at % STAGES * SLOT; }
};
// How many of `all` this program has: that of its number, and every PROGRAMS-th one behind.
__device__ __forceinline__ int share_of(int all) {
  const int n = blockIdx.x;
  return n < all ? (all - 1 - n) / PROGRAMS + 1 : 0;
}

// Words in the order of their numbers, as attention reads them.
struct InOrder {
  static __device__ __forceinline__ int word(int, int k) { return k / 2; }
};

template <class O>
struct Product : Sizes<O> {
  typedef Sizes<O> S;
  typedef typename NumberOf<O::FLOAT_NORM>::Type Norm;
  // Qkv, which reads what enters a layer. Of a mixture all programs do, as its size is the router's
  // unit.
  static constexpr bool ENTERS = O::NORM && !O::GATED, MEASURES = CHOSEN && ENTERS;
  static constexpr int DIGIT_WORDS = S::DIGIT_WORDS, SETS = S::SETS, INPUTS = S::INPUTS;

  static __device__ __forceinline__ int in_row(int unit) {
    return S::SUMMED ? unit % S::ROW_UNITS : unit;
  }
  // Where a row of this product's inputs has the word of inputs k and k + 1: what a lane wants of a
  // unit, and what its neighbours want, lies side by side. nth: of the experts' rows.
  static __device__ __forceinline__ int word(int nth, int k) {
    const int unit = (S::SUMMED ? nth * S::ROW_UNITS : 0) + k / S::UNIT_INPUTS;
    const int at = k % S::UNIT_INPUTS;
    if (S::PLAIN) return (unit * S::UNIT_INPUTS + at) / 2;
    constexpr int QUARTER = S::BLOCK / 4;
    const int lane = at / QUARTER * 4 + at % 8 / 2, pair = at % QUARTER / 8;
    return unit * (S::UNIT_INPUTS / 2) + pair / 2 * 64 + lane * 2 + pair % 2;
  }
  // The n-th input of a lane is number k of its row.
  static __device__ __forceinline__ int input(int unit, int lane, int n) {
    return in_row(unit) * S::UNIT_INPUTS + (S::PLAIN ? lane * 2 + n
                                              : (lane >> 2) * (S::BLOCK / 4) + (n & ~1) * 4 +
                                                    (lane & 3) * 2 + (n & 1));
  }

  typedef ::Operands<DIGIT_WORDS, SETS> Operands;
  static __device__ __forceinline__ u32* digits_of(Shared& s, int unit) {
    return (u32*)s.inputs + unit * 32 * DIGIT_WORDS;
  }
  static __device__ __forceinline__ Operands operands(Shared& s, int unit, int lane) {
    return Operands(digits_of(s, unit) + lane * DIGIT_WORDS, lane);
  }

  // Whether a lane's words of a unit are there, where word() says: pairs of its inputs.
  static __device__ __forceinline__ bool ask_for(u32 (&pairs)[INPUTS / 2], const u64* x, int unit,
                                                 int lane, u32 tag) {
    const u64* words = x + unit * (S::UNIT_INPUTS / 2);
    constexpr int ABREAST = S::PLAIN ? 1 : 2;  // in one load
    bool there = true;
#pragma unroll
    for (int i = 0; i < INPUTS / 2; i += ABREAST) {
      u64 some[2];
      if (S::PLAIN) some[0] = peek(words + lane);
      else peek_two(words + i * 32 + lane * 2, some);
#pragma unroll
      for (int j = 0; j < ABREAST; j++) {
        const bool wanted = O::K % S::UNIT_INPUTS == 0 || input(unit, lane, 2 * (i + j)) < O::K;
        pairs[i + j] = wanted ? (u32)some[j] : 0;
        there &= (u32)(some[j] >> 32) == tag || !wanted;
      }
    }
    return there;
  }

  // A lane's weights of a norm, of the units first, first + WARPS and so on.
  template <int N>
  static __device__ __forceinline__ void load_gains(float (&gain)[N][INPUTS], const Norm* norm,
                                                    int first, int lane) {
#pragma unroll
    for (int i = 0; i < N * INPUTS; i++) {
      const int k = input(first + i / INPUTS * WARPS, lane, i % INPUTS);
      gain[i / INPUTS][i % INPUTS] = O::NORM && k < O::K ? any_number(norm[k]) : 0;
    }
  }
  // Waits for a lane's pairs of these units of x: words with this tag or, if it is 0, a plain row.
  template <int N>
  static __device__ __forceinline__ void await_units(u32 (&pairs)[N][INPUTS / 2], const u64* x,
                                                     u32 tag, int first, int lane) {
    const auto unit = [&](int n) { return min(first + n * WARPS, S::UNITS - 1); };
    if (ENTERS && tag == 0) {
#pragma unroll
      for (int i = 0; i < N * INPUTS / 2; i++) {
        const int n = i / (INPUTS / 2), j = i % (INPUTS / 2), k = input(unit(n), lane, 2 * j);
        pairs[n][j] = k < O::K ? ((const u32*)x)[k / 2] : 0;
      }
      return;
    }
    for (int tries = 0;; tries++) {
      bool there = true;
#pragma unroll
      for (int n = 0; n < N; n++) there &= ask_for(pairs[n], x, unit(n), lane, tag);
      if (all_there(there)) return;
      if (tries > TRIES) give_up();
    }
  }

  // Units that a warp prepares at once, as it waits for their words. Of 16-bit weights units are
  // short, and one after the other each would take as long as its words do.
  static constexpr int ROUNDS = (S::UNITS + WARPS - 1) / WARPS;
  static constexpr int PREPARED = S::PLAIN && ROUNDS > 1 ? 2 : 1;
  // Units first, first + WARPS and so on of x, times the norm's weight.
  static __device__ __forceinline__ void prepare(Program& p, int first, const u64* x, u32 tag,
                                                 const Norm* norm) {
    float gain[PREPARED][INPUTS];
    load_gains(gain, norm, first, p.lane);
    u32 pairs[PREPARED][INPUTS / 2];
    await_units(pairs, x, tag, first, p.lane);
#pragma unroll
    for (int n = 0; n < PREPARED; n++)
      if (n == 0 || first + n * WARPS < S::UNITS) put(p, first + n * WARPS, pairs[n], gain[n]);
  }

  // Where norms stand behind branches: x is what a branch makes, and the stream that enters this
  // product is the one before, which each program has, plus the norm of x. -> its pairs, of all
  // units of the warp. Of a plain row: the stream. row_out, if it is there: where the stream goes.
  static __device__ __forceinline__ void add_branch(Program& p, u32 (&pairs)[ROUNDS][INPUTS / 2],
                                                    const u64* x, u32 tag, const Norm* behind,
                                                    u16* row_out = nullptr) {
    Shared& s = *p.s;
    const int lane = p.lane;
    float gain[ROUNDS][INPUTS];
    if (!ENTERS || tag) load_gains(gain, behind, p.warp, lane);
    await_units(pairs, x, tag, p.warp, lane);
    float factor = 0;
    if (!ENTERS || tag) {
#pragma unroll
      for (int n = 0; n < ROUNDS; n++) {
        float squares = 0;
#pragma unroll
        for (int i = 0; i < INPUTS / 2; i++) {
          const float low = low_number(pairs[n][i]), high = high_number(pairs[n][i]);
          squares += low * low + high * high;
        }
        squares = all_lanes(squares, add);
        if (p.warp + n * WARPS < S::UNITS && lane == 0)
          s.branch_squares[p.warp + n * WARPS] = squares;
      }
      meet();
      factor = rsqrtf(sum_of(s.branch_squares, S::UNITS, lane) / O::K + p.eps);
    }
#pragma unroll
    for (int n = 0; n < ROUNDS; n++)
#pragma unroll
      for (int i = 0; i < INPUTS / 2; i++) {
        const int unit = p.warp + n * WARPS, k = input(unit, lane, 2 * i);
        if (unit >= S::UNITS || k >= O::K) continue;
        u32& stream = ((u32*)s.stream)[k / 2];
        u32& pair = pairs[n][i];
        if (!ENTERS || tag)
          pair = pair_of(low_number(stream) + low_number(pair) * factor * gain[n][2 * i],
                         high_number(stream) + high_number(pair) * factor * gain[n][2 * i + 1]);
        stream = pair;
        if (row_out) ((u32*)row_out)[k / 2] = pair;
      }
  }
  static __device__ __forceinline__ void prepare_behind(Program& p, const u64* x, u32 tag,
                                                        const Norm* norm, const Norm* behind) {
    u32 pairs[ROUNDS][INPUTS / 2];
    add_branch(p, pairs, x, tag, behind);
    float gain[ROUNDS][INPUTS];
    load_gains(gain, norm, p.warp, p.lane);
#pragma unroll
    for (int n = 0; n < ROUNDS; n++)
      if (p.warp + n * WARPS < S::UNITS) put(p, p.warp + n * WARPS, pairs[n], gain[n]);
  }

  // A unit becomes digits or, for 16-bit weights, three numbers for one.
  static __device__ __forceinline__ void put(Program& p, int unit, const u32 (&pairs)[INPUTS / 2],
                                             const float (&gain)[INPUTS]) {
    Shared& s = *p.s;
    const int lane = p.lane;
    float v[INPUTS], squares = 0;
    u32 most = 0x20000000;  // 1e-19
#pragma unroll
    for (int i = 0; i < INPUTS; i++) {
      v[i] = i & 1 ? high_number(pairs[i / 2]) : low_number(pairs[i / 2]);
      if (O::NORM) {
        squares += v[i] * v[i];
        v[i] *= gain[i];
      }
      const u32 size = __float_as_uint(v[i]) & 0x7fffffff;
      most = size > most ? size : most;
    }
    if (O::NORM) {
      squares = all_lanes(squares, add);
      if (lane == 0) s.squares[unit] = squares;
    }
    // All |v| are below 2^(exponent - 126).
    const u32 exponent = __reduce_max_sync(~0u, most) >> 23;
    if constexpr (S::PLAIN) {
      // Three numbers of 16 bits, below 8 so that fp16 has room for the last, whose sum is that
      // of 24. 200 stands for any exponent where 255 makes the result NaN.
      const float scale = __uint_as_float((256 - (exponent < 255 ? exponent : 200)) << 23);
      v[0] *= scale;
      v[1] *= scale;
#pragma unroll
      for (int part = 0; part < 3; part++) {
        const u32 pair = pair_of(v[0], v[1]);
        ((u32*)s.inputs)[(unit * 3 + part) * 32 + lane] = pair;
        v[0] -= low_number(pair);
        v[1] -= high_number(pair);
      }
      if (lane == 0)
        s.scale[unit] = __uint_as_float(exponent == 255 ? 0x7fc00000 : (exponent - 2) << 23);
    } else {
      // |v * scale| is below 2^26, as the scale is 2^(152 - exponent).
      const float scale = __uint_as_float((127 + 152 - (exponent < 255 ? exponent : 200)) << 23);
      put_digits<DIGIT_WORDS, SETS, O::E2M1>(digits_of(s, unit), v, scale, lane);
      __syncwarp();
      const Operands o = operands(s, unit, lane);
      const u32 ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
      const u32 nibbles[4] = {0x11111111u, 0x11111111u, 0x11111111u, 0x11111111u};  // ones
      int c4[4][4] = {};  // each m has its own, as a chain of products is slow
#pragma unroll
      for (int m = 0; m < 4; m++) {
        if constexpr (O::BITS == 4) {
          imma(c4[m], O::E2M1 ? ones : nibbles, o.b[m][0][0], o.b[m][1][0]);
          imma(c4[m], ones, o.b[m][0][1], o.b[m][1][1]);
        } else {
          imma(c4[m], ones, o.b[m][0][0], o.b[m][1][0]);
        }
      }
      float offset = 0;
#pragma unroll
      for (int set = 0; set < SETS; set++) {
        int low = 0, high = 0;
#pragma unroll
        for (int m = set * (4 / SETS); m < (set + 1) * (4 / SETS); m++) {
          low += c4[m][0];
          high += c4[m][1];
        }
        const float sum = (float)(low + 256 * high);
        if (lane < 4) s.sums[unit][set][lane] = sum;
        offset += sum;
      }
      // 1 / scale, and what else a product is too large by: int4's codes 16, e2m1's 2. Infinity and
      // NaN have no digits.
      const float one = exponent == 255
                            ? __uint_as_float(0x7fc00000)
                            : __uint_as_float((exponent - (O::E2M1 ? 26 : O::BITS == 4 ? 29 : 25))
                                              << 23);
      if (lane == 0) s.scale[unit] = one;
      if (!S::GROUPED) {
        offset *= lane & 1 ? one * 65536 : one;
        offset += __shfl_xor_sync(~0u, offset, 1);
        offset += __shfl_xor_sync(~0u, offset, 2);
        if (lane == 0) s.offset[unit] = offset;
      }
    }
  }

  // Of a slot, the units that belong to the same expert's row as its unit w. begin: the first of
  // them; first_block: that one's first block in its row; chunk: where the slot has their scales.
  struct RowPart {
    int begin, first_block, chunk;
    __device__ __forceinline__ RowPart(int nth_slot, int w) {
      const int unit = in_row(nth_slot * SQUAD_WARPS + w);
      begin = S::SUMMED && unit < w ? w - unit : 0;
      first_block = 2 * (unit - (w - begin));
      chunk = begin * S::UNIT_CHUNKS + (S::PER_CHUNK > 1 && begin > 0);
    }
  };
  static __device__ __forceinline__ int nth_of(int tile, int unit) {
    return S::SUMMED ? unit / S::ROW_UNITS : O::EXPERTS ? tile / S::TILES : 0;
  }

  static __device__ __forceinline__ void group_of(const void* here, long long i, float& scale,
                                                  float& zero) {
    zero = O::E2M1 ? 16 : 1 << (O::BITS - 1);
    ::group_of<S::BYTE_SCALES, O::FLOAT_SCALES>(here, i, scale, zero);
  }

  // What two columns of a sum make, of row i * 8.
  static __device__ __forceinline__ float value_of(const int (&c)[4], const int (&d)[4], int i) {
    return (float)(c[2 * i] + d[2 * i]) + 256 * (float)(c[2 * i + 1] + d[2 * i + 1]);
  }

  // What a lane needs of x and of the slot's order for the same unit of several tiles.
  struct Unit {
    Operands o;
    RowPart run;
    int unit, wl, lane;
    float sums[SETS], scale;
    __device__ __forceinline__ Unit(Shared& s, int nth_slot, int wl, int lane)
        : o(operands(s, nth_slot * SQUAD_WARPS + wl, lane)), run(nth_slot, wl),
          unit(nth_slot * SQUAD_WARPS + wl), wl(wl), lane(lane) {
#pragma unroll
      for (int i = 0; i < SETS; i++) sums[i] = s.sums[unit][i][lane & 3];
      scale = lane & 1 ? s.scale[unit] * 65536 : s.scale[unit];
    }
    // Of rows lane / 4 and lane / 4 + 8, what this lane's column gives.
    __device__ __forceinline__ void multiply(const unsigned char* stage, float& y0,
                                             float& y1) const {
      const int row = lane >> 2, half = lane >> 1 & 1, unit_block = 2 * in_row(unit);
      const uint4* from = (const uint4*)(stage + wl * 2048) + lane;
      const uint4 p[2][2] = {{from[0], from[32]}, {from[64], from[96]}};  // [block][row or row + 8]
      int c[4] = {0, 0, 0, 0}, d[4] = {0, 0, 0, 0};
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const uint4 low = p[m >> 1][0], high = p[m >> 1][1];
        const u32 a[4] = {m & 1 ? low.z : low.x, m & 1 ? high.z : high.x, m & 1 ? low.w : low.y,
                          m & 1 ? high.w : high.y};
        add_products<DIGIT_WORDS, O::E2M1>(c, d, a, o.b[m]);
        if (S::GROUPED && (m + 1) % (4 / SETS) == 0) {
          const int set = m / (4 / SETS);
          const int block = unit_block + (SETS == 1 ? half : SETS == 2 ? set : set >> 1);
          const int part = SETS == 1 ? 0 : SETS == 2 ? half : (set & 1) * 2 + half;
          if (block < S::BLOCKS) {
            const int chunk = run.chunk + block / S::PER_CHUNK - run.first_block / S::PER_CHUNK;
#pragma unroll
            for (int i = 0; i < 2; i++) {
              float scale, zero;
              group_of(stage + S::CODE_BYTES, (chunk * 16 + row + 8 * i) * O::PARTS + part, scale,
                       zero);
              (i ? y1 : y0) += scale * (value_of(c, d, i) - zero * sums[set]);
            }
          }
          c[0] = c[1] = c[2] = c[3] = d[0] = d[1] = d[2] = d[3] = 0;
        }
      }
      if (!S::GROUPED) {
        y0 = value_of(c, d, 0);
        y1 = value_of(c, d, 1);
      }
      y0 *= scale;
      y1 *= scale;
    }
  };
  struct PlainUnit {
    uint4 x[2];  // of eight inputs of each 32 the part that is column lane / 4 of mma()'s operand
    float scale;
    int unit, wl, lane;
    __device__ __forceinline__ PlainUnit(const Shared& s, int nth_slot, int wl, int lane)
        : unit(nth_slot * SQUAD_WARPS + wl), wl(wl), lane(lane) {
      const int part = lane >> 2;
      const uint4* from = (const uint4*)s.inputs + (unit * 3 + min(part, 2)) * 8 + (lane & 3);
#pragma unroll
      for (int i = 0; i < 2; i++) x[i] = part < 3 ? from[i * 4] : uint4{0, 0, 0, 0};
      scale = s.scale[unit];
    }
    __device__ __forceinline__ void multiply(const unsigned char* stage, float& y0,
                                             float& y1) const {
      const unsigned char* box = stage + wl * 2048;
      float c[4] = {}, d[4] = {};
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const uint4 low = part_of(box, row_of(lane), i * 4 + (lane & 3));
        const uint4 high = part_of(box, row_of(lane) + 8, i * 4 + (lane & 3));
        // Both operands have their inputs in the same other order, which a sum does not see.
        mma(c, {low.x, high.x, low.y, high.y}, x[i].x, x[i].y);
        mma(d, {low.z, high.z, low.w, high.w}, x[i].z, x[i].w);
      }
      y0 = (c[0] + c[1] + d[0] + d[1]) * scale;
      y1 = (c[2] + c[3] + d[2] + d[3]) * scale;
    }
  };
  // Which of a tile's first eight rows a lane has.
  static __device__ __forceinline__ int row_of(int lane) {
    return S::PLAIN ? far_apart(lane >> 2) : lane >> 2;
  }
  template <bool, class A, class B> struct Either { typedef A Type; };
  template <class A, class B> struct Either<false, A, B> { typedef B Type; };

  // ABREAST squads take a tile's slots at once, and are a team; teams have tiles of their own.
  static constexpr int ABREAST = S::TILE_SLOTS < SQUADS ? S::TILE_SLOTS : SQUADS;
  static constexpr int TEAMS = SQUADS / ABREAST;
  static constexpr int ENTRIES = ABREAST * SQUAD_WARPS;  // sums of a tile and a row in partial
  // Tiles whose instructions need not wait for each other, where a team has many.
  static constexpr int AT_ONCE = TilesHere<O>::value >= 4 * TEAMS ? 2 : 1;

  // Multiplies this warp's unit of the program's tiles begin, begin + by, and so on below `here`.
  // nth_slot: which slot of a tile it is in; at: the slot of tile `begin`; the next tile's is
  // by_slots later. The sums are entry `entry` of partial, where is_first says that nothing is
  // there yet.
  static __device__ __forceinline__ void multiply_tiles(const Program& p, int nth_slot, int begin,
                                                        int by, int here, int at, int by_slots,
                                                        int entry, bool is_first) {
    Shared& s = *p.s;
    const int wl = p.warp % SQUAD_WARPS, unit = nth_slot * SQUAD_WARPS + wl, column = p.lane & 3;
    const bool there = unit < S::UNITS;
    typedef typename Either<S::PLAIN, PlainUnit, Unit>::Type MyUnit;
    const MyUnit u(s, there ? nth_slot : 0, there ? wl : 0, p.lane);
#pragma unroll 1
    for (int t = begin; t < here; t += AT_ONCE * by, at += AT_ONCE * by_slots) {
      float y[AT_ONCE][2] = {};
      int slots[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        slots[i] = t + i * by < here ? at + i * by_slots : at;  // behind the last, the first again
        wait(&s.full[slots[i] % STAGES], slots[i] / STAGES & 1);
      }
      if (there)
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) u.multiply(p.slot(slots[i]), y[i][0], y[i][1]);
      __syncwarp();
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        // The four lanes of a row: the odd ones take row + 8.
        float mine = column & 1 ? y[i][1] : y[i][0], other = column & 1 ? y[i][0] : y[i][1];
        mine += __shfl_xor_sync(~0u, other, 1);
        mine += __shfl_xor_sync(~0u, mine, 2);
        if (t + i * by >= here) break;
        if (p.lane == 0) arrive(&s.empty[slots[i] % STAGES]);
        if (column < 2) {
          float& sum = s.partial[t + i * by][entry][row_of(p.lane) + 8 * column];
          sum = is_first ? mine : sum + mine;
        }
      }
    }
  }

  // A warp's lanes have the 16 rows of the t-th tile twice: their sums -> words, and `row_out`, if
  // it is there, as a plain row.
  template <class To>
  static __device__ __forceinline__ void finish(const Program& p, int t, const Layer& layer,
                                                int field, u64* out, u32 tag, u16* row_out) {
    Shared& s = *p.s;
    const int lane = p.lane, r = lane & 15, mine = blockIdx.x + t * PROGRAMS;
    const int nth = nth_of(mine, 0), tile = O::EXPERTS && O::GATED ? mine % S::TILES : mine;
    const int n = O::GATED ? tile * 8 + (r & 7) : tile * 16 + r;  // of the outputs
    const int row = n + (O::GATED && r >= 8 ? O::N : 0);  // of w
    const bool there = n < O::N;
    float y = 0;
#pragma unroll 4
    for (int w = lane >> 4; w < ENTRIES; w += 2) y += s.partial[t][w][r];
    y += __shfl_xor_sync(~0u, y, 16);
    if (!S::GROUPED && !S::PLAIN) {
      float scale, zero;
      const long long tiles = (O::EXPERTS ? (long long)s.experts[nth] * S::TILES : 0) + tile;
      group_of(layer.at<const void>(field + SCALES), tiles * 16 + r, scale, zero);
      y = (y - zero * s.all_offsets) * scale;
    }
    if (O::NORM) y *= s.factor;
    if (O::BIAS) {
      const u16* bias = layer.at<const u16>(field + BIASES);
      if (there)
        for (int i = S::SUMMED ? 0 : nth; i < (S::SUMMED ? O::EXPERTS : nth + 1); i++)
          y += number(bias[(O::EXPERTS ? s.experts[i] : 0) * (O::GATED ? 2 : 1) * O::N + row]) *
               (S::SUMMED ? s.weights[i] : 1);
    }
    if (O::RESIDUAL) {
      y = number(rounded(y + s.residual[t][r]));
      __syncwarp();
      if (lane < 16) s.residual[t][r] = y;
    }
    if (O::GATED) {
      y = gated<O::GATED>(y, __shfl_down_sync(~0u, y, 8), p.limit, p.alpha);
      if (O::EXPERTS) y *= s.weights[nth];
    }
    constexpr int ROWS = O::GATED ? 8 : 16;
    const float low = __shfl_sync(~0u, y, lane * 2 & 31);
    const float high = __shfl_sync(~0u, y, lane * 2 + 1 & 31);
    const int pair = tile * (ROWS / 2) + lane;
    if (lane < ROWS / 2 && 2 * pair < O::N) {
      poke(out + To::word(nth, 2 * pair), word_of(pair_of(low, high), tag));
      if (O::RESIDUAL && row_out) ((u32*)row_out)[pair] = pair_of(low, high);
    }
  }

  // x: words with this tag, or a plain row if x_tag is 0. To: the product that reads what comes
  // out, whose word() says where it goes. behind: if BEHIND, the weight of the norm of x.
  template <class To>
  static __device__ __forceinline__ void run(Program& p, const Layer& layer, int which,
                                             const u64* x, u32 x_tag, u64* out, u32 tag,
                                             u16* row_out = nullptr,
                                             const Norm* behind = nullptr) {
    const int here = share_of(S::ALL), field = which * PER_PRODUCT;
    constexpr bool ADDS = BEHIND && O::NORM;
    // Who chooses no experts does not ask how large the stream is: nobody would wait for it.
    if (!here && !(ADDS && KEEPS_STREAM) && !(MEASURES && CHOOSES)) return;
    p.reload_ids();
    const Norm* norm = O::NORM ? layer.at<const Norm>(field + NORM_WEIGHT) : nullptr;
    if constexpr (ADDS) {
      prepare_behind(p, x, x_tag, norm, behind);
    } else {
#pragma unroll 1
      for (int first = p.warp; first < S::UNITS; first += PREPARED * WARPS)
        prepare(p, first, x, x_tag, norm);
    }
    meet();
    // Now, while the first slots come: behind the products all would wait for it.
    if (p.warp == 0) {
      Shared& s = *p.s;
      s.streaming = 1;
      if (!S::GROUPED && !S::PLAIN) {
        const float offset = sum_of(s.offset, S::UNITS, p.lane);
        if (p.lane == 0) s.all_offsets = offset;
      }
      if (O::NORM) {
        const float mean = sum_of(s.squares, S::UNITS, p.lane) / O::K + p.eps;
        if (p.lane == 0) {
          s.factor = rsqrtf(mean);
          if (MEASURES) s.entering = mean;
        }
      }
    }
    const int squad = p.warp / SQUAD_WARPS;
    if constexpr (TEAMS > 1) {
      const int nth_slot = squad % ABREAST, team = squad / ABREAST;
      if (team < TEAMS)
        multiply_tiles(p, nth_slot, team, TEAMS, here, p.next_slot + team * ABREAST + nth_slot,
                       TEAMS * ABREAST, nth_slot * SQUAD_WARPS + p.warp % SQUAD_WARPS, true);
    } else {
      int at = p.next_slot;
#pragma unroll 1
      for (int first = 0; first < S::TILE_SLOTS; first += ABREAST) {
        const int width = min(ABREAST, S::TILE_SLOTS - first);
        if (squad < width)
          multiply_tiles(p, first + squad, 0, 1, here, at + squad, width, p.warp, first == 0);
        at += here * width;
      }
    }
    p.next_slot += here * S::TILE_SLOTS;
    meet();
    if (p.warp == 0) p.s->streaming = 0;
#pragma unroll 1
    for (int t = p.warp; t < here; t += WARPS)
      finish<To>(p, t, layer, field, out, tag, row_out);
  }
};

#if CHOSEN
// A router's logits are sums over the residual stream, of which each program has some rows: it
// multiplies those and adds what they give to the words of `logits`, one an expert and one more for
// the squares of the stream:
//
//     | a sum of 54 bits, with its sign | how many have been added: COUNT_BITS |
//
// Sums of fixed-point numbers are the same in any order. STREAM_TILES numbers together stay below
// 2^(BAD_BIT - 1). What is no number, or is too large, counts 2^BAD_BIT, and all of these fit. The
// steps with even and odd numbers have words of their own, and each step clears the other's for the
// next; within a step a layer's sum is what a word has grown by. Of each word there are COPIES,
// which the reader adds: additions of all programs to one word wait for each other.
constexpr int STREAM_TILES = Sizes<Wo>::TILES, COUNT_BITS = 10, COPIES = 4;
constexpr int bits_of(int x) { return x ? 1 + bits_of(x / 2) : 0; }
constexpr int BAD_BIT = 53 - bits_of(STREAM_TILES), MOST_BIT = BAD_BIT - 1 - bits_of(STREAM_TILES);
// Below the point, of a logit and of the squares, in units of the stream that enters the layer.
constexpr int LOGIT_BITS = 22, SQUARES_BITS = 16;
constexpr int SUMS = RouterOp::N + 1;  // of one copy
static_assert(STREAM_TILES < 1 << COUNT_BITS);

// The largest power of two up to the size of the stream that enters the layer.
__device__ __forceinline__ float stream_unit(const Program& p) {
  const float rms = sqrtf(fminf(fmaxf(p.s->entering, 1e-30f), 1e30f));
  return __uint_as_float(__float_as_uint(rms) & 0x7f800000);
}
__device__ __forceinline__ void add_number(u64* sum, float y) {
  const bool fits = fabsf(y) < (float)(1ull << MOST_BIT);  // no NaN does
  const long long number = fits ? llrintf(y) : 1ll << BAD_BIT;
  atomicAdd(sum, ((u64)number << COUNT_BITS) + 1);
}
__device__ __forceinline__ void add_to_logits(Program& p, const Layer& layer, u64* logits) {
  typedef NumberOf<RouterOp::FLOAT_NORM>::Type Norm;
  constexpr int X = RouterOp::N;
  p.reload_ids();
  Shared& s = *p.s;
  const int here = share_of(STREAM_TILES), lane = p.lane, quarter = lane & 3;
  if (!here) return;
  const u16* weight = layer.at<const u16>(ROUTER * PER_PRODUCT + CODES);
  const Norm* norm = layer.at<const Norm>(ROUTER * PER_PRODUCT + NORM_WEIGHT);
  const int e_here = p.warp * 8 + (lane >> 2), k_here = (int)blockIdx.x * 16 + quarter * 4;
  const auto load = [&](int e, int k) {
    return k < D ? *(const uint2*)(weight + (long long)min(e, X - 1) * D + k) : uint2{0, 0};
  };
  uint2 w = load(e_here, k_here);
  const float one = 1 / stream_unit(p), scale = one * (1 << LOGIT_BITS);
  u64* sums = logits + (s.odd * COPIES + blockIdx.x % COPIES) * SUMS;
  meet();  // the rows are there
#pragma unroll 1
  for (int t = 0; t < here; t++) {
    const int k = k_here + t * PROGRAMS * 16;
    float4 rows = *(const float4*)&s.residual[t][quarter * 4];
    if (p.warp == t % WARPS) {
      float squares = k < D && lane < 4 ? rows.x * rows.x + rows.y * rows.y + rows.z * rows.z +
                                              rows.w * rows.w
                                        : 0;
      squares = all_lanes<4>(squares, add);
      if (lane == 0) add_number(sums + X, squares * one * one * (1 << SQUARES_BITS));
    }
    if (k < D) {
      rows.x *= any_number(norm[k]);
      rows.y *= any_number(norm[k + 1]);
      rows.z *= any_number(norm[k + 2]);
      rows.w *= any_number(norm[k + 3]);
    }
#pragma unroll 1
    for (int e = e_here; e - (lane >> 2) < X; e += WARPS * 8) {
      if (t || e != e_here) w = load(e, k);
      float y = low_number(w.x) * rows.x + high_number(w.x) * rows.y + low_number(w.y) * rows.z +
                high_number(w.y) * rows.w;
      y += __shfl_xor_sync(~0u, y, 1);
      y += __shfl_xor_sync(~0u, y, 2);
      if (quarter == 0 && e < X) add_number(sums + e, y * scale);
    }
  }
}

// What the n-th sum of a copy has grown by. All lanes of a warp call this together.
__device__ __forceinline__ float await_sum(Program& p, const u64* sums, int n, u64& before) {
  for (int tries = 0;; tries++) {
    u64 grown = -before;
#pragma unroll
    for (int c = 0; c < COPIES; c++) grown += peek(sums + c * SUMS + n);
    if (all_there((grown & (1 << COUNT_BITS) - 1) == STREAM_TILES)) {
      before += grown;
      const long long sum = (long long)grown >> COUNT_BITS;
      return sum < 1ll << BAD_BIT - 1 ? (float)sum : __uint_as_float(0x7fc00000);
    }
    if (tries > TRIES) give_up();
  }
}

// The experts with the largest logits, of equal ones those with the lowest numbers, and their
// weights. A NaN among the logits makes all weights NaN. An expert's place is how many come before
// it, which all warps count.
__device__ __forceinline__ void choose_experts(Program& p, const Layer& layer, const u64* logits,
                                               float scale) {
  constexpr int X = RouterOp::N, ALL = (X + 31) / 32 * 32;
  constexpr int LOWEST = -0x7fffffff;  // below all numbers
  p.reload_ids();
  Shared& s = *p.s;
  const int lane = p.lane;
  bool nan = false;
  u64 before_squares = 0;
  if (p.warp * 32 < X) {
    const float unit = stream_unit(p);
    const u16* bias = layer.at<const u16>(ROUTER * PER_PRODUCT + BIASES);
    const u64* sums = logits + s.odd * COPIES * SUMS;
    // First the squares alone: asking for all words delays those who still add.
    u64 squares_before = s.before[X];
    const float squares = await_sum(p, sums, X, squares_before);
    const float one =
        rsqrtf(squares * unit * unit / (1 << SQUARES_BITS) / D + p.eps) * unit / (1 << LOGIT_BITS);
#pragma unroll 1
    for (int e = p.warp * 32 + lane; e - lane < X; e += WARPS * 32) {
      const int n = min(e, X - 1);
      u64 before = s.before[n];
      float logit = await_sum(p, sums, n, before) * one;
      __syncwarp();  // all have read before one writes
      if (RouterOp::BIAS) logit += number(bias[n]);
      if (e < X) s.before[e] = before;
      const int bits = __float_as_uint(logit);
      nan |= logit != logit;
      s.keys[e] = e < X && logit == logit ? bits ^ (bits >> 31 & 0x7fffffff) : LOWEST;
    }
    before_squares = squares_before;
  }
  nan = meet_any(nan);
  if (p.warp == 0 && lane == 0) s.before[X] = before_squares;
#pragma unroll 1
  for (int first = p.warp * 8; first < X; first += WARPS * 8) {
    const int e = min(first + (lane >> 2), X - 1), mine = s.keys[e];
    int before = 0;
#pragma unroll 2
    for (int i = (lane & 3) * 4; i < ALL; i += 16) {
      const uint4 four = *(const uint4*)&s.keys[i];
      const int keys[4] = {(int)four.x, (int)four.y, (int)four.z, (int)four.w};
      if (i / 4 == e / 4) {  // mine is one of these
#pragma unroll
        for (int j = 0; j < 4; j++) before += keys[j] > mine - (i + j < e);
      } else {
        const int least = i < e ? mine - 1 : mine;
#pragma unroll
        for (int j = 0; j < 4; j++) before += keys[j] > least;
      }
    }
    before += __shfl_xor_sync(~0u, before, 1);
    before += __shfl_xor_sync(~0u, before, 2);
    if (before < CHOSEN) {
      s.experts[before] = e;
      s.weights[before] = __uint_as_float(mine ^ (mine >> 31 & 0x7fffffff));  // its logit
    }
  }
  meet();
  if (p.warp) return;
  if (lane == 0) arrive(&s.chosen);
  const float top = s.weights[0];
  const float share = lane < CHOSEN ? exp2f((s.weights[lane] - top) * LOG2_E) : 0;
  float all = NORMALIZE ? share : 0;
  if (!NORMALIZE)
    for (int e = lane; e < X; e += 32) {
      const int key = s.keys[e];
      all += exp2f((__uint_as_float(key ^ (key >> 31 & 0x7fffffff)) - top) * LOG2_E);
    }
  all = all_lanes(all, add);
  __syncwarp();
  if (lane < CHOSEN) s.weights[lane] = nan ? __uint_as_float(0x7fc00000) : share / all * scale;
}
#endif

// Attention's tasks: each is a kv head, some parts of its values, and one of n splits of the cache's
// slots that a token at `position` sees. A text of up to PASS slots has one split, and a task one
// part. Of a longer one a task has WIDE parts, as it reads all of a key, and a split has up to
// PASS / WIDE slots, or more where there are no more programs or LARGEST_SPLITS.
struct Splits {
  int first, end, chunk, n, parts;
  __device__ __forceinline__ Splits(int position, int window) {
    end = position + 1;
    first = window && end > window ? end - window : 0;
    const int seen = end - first;
    n = parts = 1;
    chunk = (seen + 15) / 16 * 16;
    if (chunk <= PASS) return;
    parts = WIDE;
    const int programs = max(1, PROGRAMS / (KV_HEADS * COLUMN_PARTS / WIDE));
    n = min(min(LARGEST_SPLITS, programs), (seen + PASS / WIDE - 1) / (PASS / WIDE));
    chunk = ((seen + n - 1) / n + 15) / 16 * 16;
    n = (seen + chunk - 1) / chunk;
  }
  // Of things that come once for each part of a task, which part the i-th is for, and how many came
  // before for the same one.
  __device__ __forceinline__ int which_part(int i) const { return i & parts - 1; }
  __device__ __forceinline__ int nth_of_part(int i) const { return i >> parts - 1; }
  // The first programs have more of the products' tiles.
  __device__ __forceinline__ int first_task() const {
    const int n = (int)blockIdx.x - PROGRAMS / 2;
    return n < 0 ? n + PROGRAMS : n;
  }
  __device__ __forceinline__ int tasks() const {
    return KV_HEADS * nth_of_part(COLUMN_PARTS) * n;
  }
};
struct Task {
  int part, kv, split, begin, end;  // of the slots in the cache, without the new token's
  bool has_new;
  __device__ __forceinline__ Task(int nth, const Splits& of, int position) {
    const int whole = of.n > 1 ? nth / of.n : nth;
    split = nth - whole * of.n;
    part = whole / KV_HEADS * of.parts;  // the first
    kv = whole % KV_HEADS;
    has_new = split + 1 == of.n;
    begin = of.first + split * of.chunk;
    end = min(begin + of.chunk, position);
  }
};

// The n-th tensor map of a layer: of products with 16-bit weights, of keys and of values.
constexpr int MAPS = 6;
template <class O>
__device__ __forceinline__ const void* map_of(const u64* fields, int which) {
  return Sizes<O>::PLAIN ? (const void*)fields[which * PER_PRODUCT + CODES] : nullptr;
}
__device__ __forceinline__ const void* map_at(const u64* fields, int n) {
  switch (n) {
    case 0: return map_of<Qkv>(fields, QKV);
    case 1: return map_of<Wo>(fields, WO);
    case 2: return map_of<Up>(fields, UP);
    case 3: return map_of<Down>(fields, DOWN);
    case 4: return (const void*)fields[K_MAP];
    default: return (const void*)fields[V_MAP];
  }
}

// The producer: a warp that copies the slots in the order in which they are multiplied. It waits
// for a free slot, for all but IN_FLIGHT - 1 copies to land and, of a mixture, for the experts.
struct Producer {
  Program p;
  int back = 0;  // the first slot that may be on its way

  // A free slot, of which so many bytes will be copied, once fewer than IN_FLIGHT are on their way:
  // a long queue of copies delays the words that others wait for, so it is shorter while they do.
  __device__ __forceinline__ int begin(int bytes) {
    const int at = p.next_slot++;
    wait(&p.s->empty[at % STAGES], (at / STAGES & 1) ^ 1);
    const int most = p.s->streaming ? IN_FLIGHT : IN_FLIGHT_WAITING;
    for (; back + most <= at; back++) wait(&p.s->full[back % STAGES], back / STAGES & 1);
    if (p.lane == 0) {
      p.s->held[at % STAGES] = at;
      expect_and_arrive(&p.s->full[at % STAGES], bytes);
    }
    __syncwarp();
    return at;
  }

  template <class O>
  __device__ __forceinline__ void feed_slot(const unsigned char* codes, const unsigned char* scales,
                                            int mine, int nth_slot) {
    typedef Sizes<O> S;
    const int expert = O::EXPERTS ? p.s->experts[mine / S::TILES] : 0;
    const int tile = O::EXPERTS ? mine % S::TILES : mine;
    constexpr int SLOT_BLOCKS = 2 * SQUAD_WARPS;  // blocks
    const int block = nth_slot * SLOT_BLOCKS, blocks = min(SLOT_BLOCKS, S::BLOCKS - block);
    const int chunk = block / S::PER_CHUNK;
    const int chunk_bytes =
        S::GROUPED ? ((block + blocks - 1) / S::PER_CHUNK - chunk + 1) * S::CHUNK_BYTES : 0;
    const int at = begin(blocks * 1024 + chunk_bytes);
    if (p.lane == 0) {
      const long long rows = (long long)expert * S::TILES + tile;
      u64* full = &p.s->full[at % STAGES];
      copy(p.slot(at), codes + (rows * S::BLOCKS + block) * 1024, blocks * 1024, full);
      if (S::GROUPED)
        copy(p.slot(at) + S::CODE_BYTES, scales + (rows * S::CHUNKS + chunk) * S::CHUNK_BYTES,
             chunk_bytes, full);
    }
  }

  // 16-bit weights, of which a slot has the units one behind the other, and of each its 16 rows.
  template <class O>
  __device__ __forceinline__ void feed_plain_slot(const void* map, int mine, int nth_slot) {
    typedef Product<O> P;
    typedef Sizes<O> S;
    const int tile = O::EXPERTS && O::GATED ? mine % S::TILES : mine;
    const int unit = nth_slot * SQUAD_WARPS + p.lane * S::COPY_UNITS;
    const int copies =
        S::SUMMED ? min(SQUAD_WARPS, S::UNITS - nth_slot * SQUAD_WARPS) / S::COPY_UNITS : 1;
    const int at = begin(copies * S::COPY_UNITS * 2048);
    if (p.lane < copies)
      copy_box(p.slot(at) + p.lane * S::COPY_UNITS * 2048, map, tile * (O::GATED ? 8 : 16),
               P::in_row(unit), O::EXPERTS ? p.s->experts[P::nth_of(mine, unit)] : 0,
               &p.s->full[at % STAGES]);
    __syncwarp();
  }

  // Down of a mixture: units of several experts' rows. Lane w has the copies of the units that
  // belong to the same row as unit w, if that is the first of them.
  template <class O>
  __device__ __forceinline__ void feed_summed_slot(const unsigned char* codes,
                                                   const unsigned char* scales, int tile,
                                                   int nth_slot) {
    typedef Sizes<O> S;
    const int w = p.lane, w_end = min(SQUAD_WARPS, S::UNITS - nth_slot * SQUAD_WARPS);
    const typename Product<O>::RowPart run(nth_slot, w);
    const bool begins = w < w_end && run.begin == w;
    const int units = min(S::ROW_UNITS - run.first_block / 2, w_end - w);
    const int blocks = min(2 * units, S::BLOCKS - run.first_block);
    const int chunk = run.first_block / S::PER_CHUNK;
    const int chunk_bytes =
        S::GROUPED
            ? ((run.first_block + blocks - 1) / S::PER_CHUNK - chunk + 1) * S::CHUNK_BYTES
            : 0;
    const int at = begin(__reduce_add_sync(~0u, begins ? blocks * 1024 + chunk_bytes : 0));
    unsigned char* slot = p.slot(at);
    u64* full = &p.s->full[at % STAGES];
    const int expert = begins ? p.s->experts[(nth_slot * SQUAD_WARPS + w) / S::ROW_UNITS] : 0;
    if (begins) {
      const long long rows = (long long)expert * S::TILES + tile;
      copy(slot + w * 2048, codes + (rows * S::BLOCKS + run.first_block) * 1024, blocks * 1024,
           full);
      if (S::GROUPED)
        copy(slot + S::CODE_BYTES + run.chunk * S::CHUNK_BYTES,
             scales + (rows * S::CHUNKS + chunk) * S::CHUNK_BYTES, chunk_bytes, full);
    }
    __syncwarp();
  }

  // Of attention's tasks, the cache.
  __device__ __forceinline__ void feed_cache(const Layer& layer, int position) {
    p.reload_ids();
    const Splits splits(position, (int)(u32)layer.fields[LENGTH_AND_WINDOW]);
#pragma unroll 1
    for (int n = splits.first_task(); n < splits.tasks(); n += PROGRAMS) {
      const Task task(n, splits, position);
#pragma unroll 1
      for (int row = task.begin; row < task.end; row += CACHE_ROWS) {
        const int at = begin(KEY_BYTES + splits.parts * VALUE_BYTES), part = p.lane - 1;
        u64* full = &p.s->full[at % STAGES];
        if (p.lane == 0)
          copy_box(p.slot(at), layer.at<void>(K_MAP), row, task.kv, 0, full);
        else if (part < splits.parts)
          copy_box(p.slot(at) + KEY_BYTES + part * VALUE_BYTES, layer.at<void>(V_MAP), row, task.kv,
                   task.part + part, full);
        __syncwarp();
      }
    }
  }

  template <class O>
  __device__ __forceinline__ void feed(const Layer& layer, int which) {
    typedef Product<O> P;
    typedef Sizes<O> S;
    p.reload_ids();
    const int here = share_of(S::ALL), field = which * PER_PRODUCT;
    const unsigned char* codes = layer.at<const unsigned char>(field + CODES);
    const unsigned char* scales = layer.at<const unsigned char>(field + SCALES);
#pragma unroll 1
    for (int first = 0; first < S::TILE_SLOTS; first += P::ABREAST)
#pragma unroll 1
      for (int t = 0; t < here; t++)
#pragma unroll 1
        for (int n = first; n < min(first + P::ABREAST, S::TILE_SLOTS); n++) {
          const int mine = blockIdx.x + t * PROGRAMS;
          if constexpr (S::PLAIN) feed_plain_slot<O>(codes, mine, n);
          else if constexpr (S::SUMMED) feed_summed_slot<O>(codes, scales, mine, n);
          else feed_slot<O>(codes, scales, mine, n);
        }
  }

};

// A head's elements in a lane's hands: LANE_ELEMENTS neighbours, its partner of the rotation in
// lane ^ 16.
constexpr int LANE_ELEMENTS = HEAD_DIM / 32;
typedef NumberOf<FLOAT_QK_NORM>::Type HeadNorm;
__device__ __forceinline__ void await_head(float (&x)[LANE_ELEMENTS], const u64* words, int head,
                                           u32 tag, int lane) {
  int at[LANE_ELEMENTS / 2];
  u32 pairs[LANE_ELEMENTS / 2];
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS / 2; i++)
    at[i] = (head * HEAD_DIM + lane * LANE_ELEMENTS) / 2 + i;
  await(pairs, words, at, tag);
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; i++)
    x[i] = i & 1 ? high_number(pairs[i / 2]) : low_number(pairs[i / 2]);
}
// RMSNorm and the rotation of a query or key, whose factors are loaded before it is there.
struct NormAndRope {
  float norm[LANE_ELEMENTS], cos[LANE_ELEMENTS], sin[LANE_ELEMENTS];
  __device__ __forceinline__ NormAndRope(const HeadNorm* weight, const float* cosines,
                                         const float* sines, int lane) {
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; i++) {
      norm[i] = QK_NORM ? any_number(weight[lane * LANE_ELEMENTS + i]) : 1;
      cos[i] = cosines[lane * LANE_ELEMENTS + i];
      sin[i] = sines[lane * LANE_ELEMENTS + i];
    }
  }
  __device__ __forceinline__ void operator()(float (&x)[LANE_ELEMENTS], float eps, int lane) const {
    if (QK_NORM) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < LANE_ELEMENTS; i++) squares += x[i] * x[i];
      const float rms = rsqrtf(all_lanes(squares, add) / HEAD_DIM + eps);
#pragma unroll
      for (int i = 0; i < LANE_ELEMENTS; i++) x[i] = number(rounded(x[i] * rms * norm[i]));
    }
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; i++) {
      const float other = __shfl_xor_sync(~0u, x[i], 16);
      x[i] = x[i] * cos[i] + (lane < 16 ? -other : other) * sin[i];
    }
  }
};
__device__ __forceinline__ void put_head(u16* to, const float (&x)[LANE_ELEMENTS], int lane) {
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; i += 2)
    ((u32*)to)[(lane * LANE_ELEMENTS + i) / 2] = pair_of(x[i], x[i + 1]);
}

// Attention of a kv head's queries over one split: words of `out`, or, of several splits, `parts`:
// [HEADS, LARGEST_SPLITS, HEAD_DIM + 2] of fp32 sums, largest score and total. Each warp has every
// WARPS-th 16 slots and one part of the values, or, where a task has two, every second warp has one
// part, and all of these each 16 slots. As in arXiv 2307.08691 each has its own largest score; in the
// end they are joined.
__device__ __forceinline__ void attend(Program& p, const Layer& layer, int nth, const Splits& of,
                                       const u64* qkv, u64* parts, u64* out, u32 tag, int position,
                                       float eps, float scale) {
  p.reload_ids();
  Shared& s = *p.s;
  const int lane = p.lane, warp = p.warp, g = lane >> 2, t = lane & 3;
  const Task task(nth, of, position);
  const int kv = task.kv;
#pragma unroll 1
  for (int i = warp; i < QUERIES + (task.has_new ? 2 : 0); i += WARPS) {
    float x[LANE_ELEMENTS];
    const bool is_query = i < QUERIES, is_key = i == QUERIES;
    const NormAndRope turn(layer.at<const HeadNorm>(is_query ? Q_NORM : K_NORM),
                    layer.at<const float>(COS) + (long long)position * HEAD_DIM,
                    layer.at<const float>(SIN) + (long long)position * HEAD_DIM, lane);
    const int head = is_query ? kv * QUERIES + i : HEADS + (is_key ? 0 : KV_HEADS) + kv;
    await_head(x, qkv, head, tag, lane);
    if (is_query || is_key) turn(x, eps, lane);
    put_head(is_query ? s.q[i] : is_key ? s.k : s.v, x, lane);
    if (!is_query && task.part == 0) {
      const int length = (int)(layer.fields[LENGTH_AND_WINDOW] >> 32);  // slots of the cache
      put_head(layer.at<u16>(is_key ? K_CACHE : V_CACHE) +
                   ((long long)kv * length + position) * HEAD_DIM,
               x, lane);
    }
  }
  meet();
  if (warp == 0) s.streaming = 1;

  // The new token's slot is read from shared memory, as 16 slots of which 15 are masked.
  const int cached = (task.end - task.begin + 15) / 16, all_tiles = cached + task.has_new;
  const int nth_part = of.which_part(warp), first_tile = of.nth_of_part(warp);
  float largest[2] = {-1e30f, -1e30f}, total[2] = {0, 0}, acc[4][4] = {};  // of queries 2 t + j
#pragma unroll 1
  for (int tile = first_tile; tile < all_tiles; tile += of.nth_of_part(WARPS)) {
    const int last = tile == cached ? 0 : task.end - task.begin - tile * 16 - 1;  // that is seen
    const bool is_new = tile == cached;
    const int at = p.next_slot + tile / SLOT_TILES;
    if (!is_new) {
      // A warp takes few of these slots, and may come before the one that had this place is there:
      // a barrier's parity alone would let it through.
      wait_for(s.held[at % STAGES], at);
      wait(&s.full[at % STAGES], at / STAGES & 1);
    }
    // Row n of the left operand is slot far_apart(n) of the tile's 16, where lane 4 g + t has rows
    // g and g + 8. Behind the last slot the last is read again, and masked below.
    const unsigned char* box = p.slot(at);
    const unsigned char* keys = is_new ? (const unsigned char*)s.k : box;
    const int bytes = is_new ? COLUMNS * 2 : CACHE_ROWS * 128;  // between 64 columns and the next
    const int row = is_new ? 0 : tile % SLOT_TILES * 16;
    const int rows[2] = {row + min(far_apart(g), last), row + min(far_apart(g) + 8, last)};
    float c[4] = {}, d[4] = {};  // of query 2 t + i % 2 and slot g + i / 2 * 8
    const u16* query = s.q[min(g, QUERIES - 1)];
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; i++) {
      // Both operands have their elements in the same other order, which a sum does not see.
      const uint4 q = *(const uint4*)(query + 32 * i + 8 * t);
      const uint4 k0 = part_of(keys + i / 2 * bytes, rows[0], i * 4 + t);
      const uint4 k1 = part_of(keys + i / 2 * bytes, rows[1], i * 4 + t);
      mma(c, {k0.x, k1.x, k0.y, k1.y}, q.x, q.y);
      mma(d, {k0.z, k1.z, k0.w, k1.w}, q.z, q.w);
    }
    // Columns 8 g to 8 g + 7 of the values of rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
    const unsigned char* values =
        is_new ? (const unsigned char*)(s.v + (task.part + nth_part) * COLUMNS)
               : box + KEY_BYTES + nth_part * VALUE_BYTES;
    uint4 value[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      value[j] = part_of(values, row + min(j / 2 * 8 + far_apart(2 * t + j % 2), last), g);
    if (!is_new) {
      __syncwarp();
      // A slot has SLOT_TILES tiles, and wants SQUAD_WARPS arrivals. The warps of the text's last
      // tile arrive for those, too, that the text does not have.
      const int arrivals = of.nth_of_part(SQUAD_WARPS / SLOT_TILES);
      const int more = tile + 1 == cached ? SLOT_TILES - 1 - tile % SLOT_TILES : 0;
      if (lane == 0) arrive_for(&s.empty[at % STAGES], arrivals * (1 + more));
    }
    float most[2] = {largest[0], largest[1]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      c[i] = far_apart(g) + i / 2 * 8 <= last ? (c[i] + d[i]) * (scale * LOG2_E) : -1e30f;
      most[i % 2] = fmaxf(most[i % 2], c[i]);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int o = 4; o < 32; o *= 2) most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], o));
      if (tile != first_tile) {  // a text of few slots has no more than the first
        const float shrink = exp2f(largest[j] - most[j]);
        total[j] *= shrink;
#pragma unroll
        for (int i = 0; i < 4; i++) {
          acc[i][j] *= shrink;
          acc[i][j + 2] *= shrink;
        }
      }
      largest[j] = most[j];
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      c[i] = exp2f(c[i] - most[i % 2]);
      total[i % 2] += c[i];
    }
    // The shares as the right operand: pairs of slots of query g.
    const u32 b0 = transposed(pair_of(c[0], c[1])), b1 = transposed(pair_of(c[2], c[3]));
#pragma unroll
    for (int i = 0; i < 4; i++) {  // columns 8 g + 2 i and the next one
      u32 v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint4 words = value[j];
        v[j] = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
      }
      mma(acc[i],
          {__byte_perm(v[0], v[1], 0x5410), __byte_perm(v[0], v[1], 0x7632),
           __byte_perm(v[2], v[3], 0x5410), __byte_perm(v[2], v[3], 0x7632)},
          b0, b1);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
#pragma unroll
    for (int o = 4; o < 32; o *= 2) total[j] += __shfl_xor_sync(~0u, total[j], o);
    const int h = 2 * t + j;
    if (h < QUERIES) {
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s.attended[warp][h][8 * g + 2 * i] = acc[i][j];
        s.attended[warp][h][8 * g + 2 * i + 1] = acc[i][j + 2];
      }
      if (g == 0) {
        s.largest[h][warp] = largest[j];
        s.total[h][warp] = total[j];
      }
    }
  }
  meet();
  p.next_slot += (cached + SLOT_TILES - 1) / SLOT_TILES;
  if (warp == 0) s.streaming = 0;
  const u16* sinks = SINKS ? layer.at<const u16>(SINK) : nullptr;
  const int busy = min(WARPS, all_tiles * of.parts);  // warps
  // A warp has 32 columns of a head: lane 8 a + b columns 4 b to 4 b + 3 of every fourth warp's
  // sums.
#pragma unroll 1
  for (int i = warp; i < QUERIES * of.parts * (COLUMNS / 32); i += WARPS) {
    const int first = i % (COLUMNS / 32) * 32, of_head = i / (COLUMNS / 32);
    const int h = of.nth_of_part(of_head), head = kv * QUERIES + h;
    const int nth = of.which_part(of_head), part = task.part + nth;
    const int quarter = lane >> 3, column = first + (lane & 7) * 4;
    // Lane j has what the j-th warp with this part found.
    const int of_lane = lane % WARPS * of.parts + nth;
    const float here = of_lane < busy ? s.largest[h][of_lane] : -1e30f;
    const float sink = SINKS && of.n == 1 ? number(sinks[head]) * LOG2_E : -1e30f;
    const float most = fmaxf(all_lanes<WARPS>(here, larger), sink);
    const float share = of_lane < busy ? exp2f(here - most) : 0;
    float all = all_lanes<WARPS>(of_lane < busy ? share * s.total[h][of_lane] : 0.0f, add);
    if (SINKS && of.n == 1) all += exp2f(sink - most);
    float y[4] = {};
#pragma unroll
    for (int from = 0; from < WARPS; from += 4) {
      const int j = from + quarter, w = j * of.parts + nth;
      const float weight = __shfl_sync(~0u, share, j);
      if (w < busy) {
        const float4 sums = *(const float4*)&s.attended[w][h][column];
        y[0] += weight * sums.x;
        y[1] += weight * sums.y;
        y[2] += weight * sums.z;
        y[3] += weight * sums.w;
      }
    }
#pragma unroll
    for (int n = 0; n < 4; n++) {
      y[n] += __shfl_xor_sync(~0u, y[n], 8);
      y[n] += __shfl_xor_sync(~0u, y[n], 16);
    }
    if (of.n == 1) {
      const float one = __fdividef(1, all), low = quarter ? y[2] : y[0],
                  high = quarter ? y[3] : y[1];
      const int at = head * HEAD_DIM + part * COLUMNS + column + 2 * quarter;
      if (quarter < 2)
        poke(out + Product<Wo>::word(0, at), word_of(pair_of(low * one, high * one), tag));
    } else {
      u64* to = parts + (head * LARGEST_SPLITS + task.split) * (HEAD_DIM + 2);
      const float mine = quarter < 2 ? (quarter ? y[1] : y[0]) : quarter == 2 ? y[2] : y[3];
      poke(to + part * COLUMNS + column + quarter, word_of(__float_as_uint(mine), tag));
      // All parts of a head have the same scores, and so the same totals.
      if (part == 0 && first == 0 && lane < 2)
        poke(to + HEAD_DIM + lane, word_of(__float_as_uint(lane ? all : most), tag));
    }
  }
}

// Several splits' parts -> words of `out`. A program has 32 elements of a head; a warp of it has every
// WARPS-th split, and the first warp joins what the others have.
__device__ __forceinline__ void combine(Program& p, const Layer& layer, int n, const u64* parts,
                                        u64* out, u32 tag) {
  constexpr int PER_WARP = LARGEST_SPLITS / WARPS;
  p.reload_ids();
  Shared& s = *p.s;
  const u16* sinks = SINKS ? layer.at<const u16>(SINK) : nullptr;
  const int lane = p.lane, warp = p.warp;
#pragma unroll 1
  for (int i = blockIdx.x; i < HEADS * LANE_ELEMENTS; i += PROGRAMS) {
    meet();  // all have read what stands in s.attended
    const int head = i / LANE_ELEMENTS, e = i % LANE_ELEMENTS * 32 + lane;
    if (warp < n) {
      // Lanes 2 j and 2 j + 1 have the largest score and the total of the warp's j-th split.
      const auto place = [&](int j, int element) {
        const int split = warp + j * WARPS;
        return split < n ? split * (HEAD_DIM + 2) + element : -1;
      };
      int at[PER_WARP + 1];
#pragma unroll
      for (int j = 0; j < PER_WARP; j++) at[j] = place(j, e);
      at[PER_WARP] = lane < 2 * PER_WARP ? place(lane / 2, HEAD_DIM + lane % 2) : -1;
      u32 found[PER_WARP + 1];
      await(found, parts + head * LARGEST_SPLITS * (HEAD_DIM + 2), at, tag);
      const float ends = at[PER_WARP] < 0 ? -1e30f : __uint_as_float(found[PER_WARP]);
      const float most = all_lanes(lane % 2 || lane >= 2 * PER_WARP ? -1e30f : ends, larger);
      float y = 0, total = 0;
#pragma unroll
      for (int j = 0; j < PER_WARP; j++) {
        const float share = exp2f(__shfl_sync(~0u, ends, 2 * j) - most);
        const float all = __shfl_sync(~0u, ends, 2 * j + 1);
        if (at[j] < 0) continue;
        y += share * __uint_as_float(found[j]);
        total += share * all;
      }
      s.attended[warp][0][lane] = y;
      if (lane == 0) {
        s.largest[0][warp] = most;
        s.total[0][warp] = total;
      }
    }
    meet();
    if (warp == 0) {
      const int busy = min(n, WARPS);
      const float here = lane < busy ? s.largest[0][lane] : -1e30f;
      const float sink = SINKS ? number(sinks[head]) * LOG2_E : -1e30f;
      const float most = fmaxf(all_lanes(here, larger), sink);
      const float share = lane < busy ? exp2f(here - most) : 0;
      float total = all_lanes(lane < busy ? share * s.total[0][lane] : 0.0f, add), y = 0;
      if (SINKS) total += exp2f(sink - most);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float part = __shfl_sync(~0u, share, w);
        if (w < busy) y += part * s.attended[w][0][lane];
      }
      y /= total;
      const float next = __shfl_down_sync(~0u, y, 1);
      if (!(lane & 1))
        poke(out + Product<Wo>::word(0, head * HEAD_DIM + e), word_of(pair_of(y, next), tag));
    }
  }
}

// x [D], positions [1] -> y [D], what leaves the last layer. layers: FIELDS numbers each. started:
// how many programs have begun, ever; it numbers the steps. qkv, parts, attended, middle, logits,
// gated, ends: words.
extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1)
whole_step(const u16* x, const long long* positions, u16* y, const u64* layers, u64* started,
           u64* qkv, u64* parts, u64* attended, u64* middle, u64* logits, u64* gated, u64* ends,
           float eps, float qk_eps, float scale, float route_scale, float limit, float alpha) {
  const int lane = threadIdx.x % 32;
  // The ring begins at a multiple of 1,024, by which copy_box() orders what it copies.
  unsigned char* const memory = shared_memory();
  Shared& s = *(Shared*)(memory + STAGES * SLOT);
  Program p{&s, memory, (int)threadIdx.x / 32, lane, 0, eps, limit, alpha};
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      init(&s.full[i], 1);
      init(&s.empty[i], SQUAD_WARPS);
      s.held[i] = -1;
    }
    init(&s.chosen, 1);
    barriers_are_ready();
    // The first layer's. No layer's is 0, which says that there is none.
    const u64 step = atomicAdd(started, 1ull) / PROGRAMS;
    s.tag = (u32)(step % (0xFFFFFFFFu / LAYERS - 1)) * LAYERS + 1;
    s.odd = step & 1;
    s.is_first = step == 0;
    s.streaming = 0;
  }
  if (threadIdx.x < 2 * FIELDS)
    s.fields[threadIdx.x / FIELDS][0][threadIdx.x % FIELDS] = layers[threadIdx.x % FIELDS];
  for (int t = p.warp; t < share_of(Sizes<Wo>::ALL); t += WARPS + 1) {
    const int n = (blockIdx.x + t * PROGRAMS) * 16 + lane;
    if (lane < 16) s.residual[t][lane] = n < D ? number(x[n]) : 0;
  }
#if CHOSEN
  for (int e = threadIdx.x; e < SUMS; e += (WARPS + 1) * 32) s.before[e] = 0;
#endif
  __syncthreads();
  const u32 first_tag = s.tag;
#if CHOSEN
  if (blockIdx.x == 0)  // zeros for the next step
    for (int e = threadIdx.x; e < COPIES * SUMS; e += (WARPS + 1) * 32)
      logits[(1 - s.odd) * COPIES * SUMS + e] = 0;
#endif
  const int position = (int)positions[0];

  // Both loops have the same products in the same order, as a slot of the ring is known by its
  // number alone. What another product takes:
  //  1. Here: a place in the enum of products and in OPERATIONS, a line in each of the loops, and
  //     one in map_at(). RESIDUAL says that its tiles are Wo's, whose rows of the stream s.residual
  //     has; MEASURES, that it is Qkv.
  //  2. In step.py: a line in operations(), its place in fields(), and FIELDS, which the enum
  //     counts. A lane copies one field: with more than 32, both copy_word() take a loop.
  //  3. A row of words: among Step's, which stand in the order of this function's parameters, and
  //     in tests/fast/cuda_on_cpu.h, which calls it. It must be on the chain that step.py draws.
  if (p.warp == WARPS) {
    if (s.is_first && lane < MAPS)
#pragma unroll 1
      for (int i = 0; i < LAYERS; i++)
        if (const void* map = map_at(layers + i * FIELDS, lane)) forget_map(map);
    __syncwarp();
    Producer producer{p};
#pragma unroll 1
    for (int i = 0; i < LAYERS; i++) {
      const Layer layer{s.fields[0][i % 2]};
      if (i + 1 < LAYERS && lane < FIELDS)
        copy_word(&s.fields[0][(i + 1) % 2][lane], layers + (i + 1) * FIELDS + lane);
      producer.feed<Qkv>(layer, QKV);
      producer.feed_cache(layer, position);
      producer.feed<Wo>(layer, WO);
#if CHOSEN
      if (CHOOSES) wait(&s.chosen, i & 1);
#endif
      producer.feed<Up>(layer, UP);
      wait_for_copies();
      __syncwarp();
      // The next layer's maps come while these weights do.
      if (i + 1 < LAYERS && lane < MAPS)
        if (const void* map = map_at(s.fields[0][(i + 1) % 2], lane)) prefetch_map(map);
      producer.feed<Down>(layer, DOWN);
    }
    return;
  }

#pragma unroll 1
  for (int i = 0; i < LAYERS; i++) {
    const Layer layer{s.fields[1][i % 2]};
    const u32 tag = first_tag + i;
    const auto weight_behind = [&](int layer, int which) {
      const Layer of{s.fields[1][layer & 1]};
      return of.at<const Product<Qkv>::Norm>(which * PER_PRODUCT + NORM_WEIGHT);
    };
    Product<Qkv>::run<InOrder>(p, layer, QKV, i ? ends : (const u64*)x, i ? tag - 1 : 0, qkv, tag,
                               nullptr, weight_behind(i + 1, DOWN));
    if (!share_of(Sizes<Qkv>::ALL)) meet();
    // All warps are behind the layer before, whose fields go.
    if (i + 1 < LAYERS && p.warp == 0 && lane < FIELDS)
      copy_word(&s.fields[1][(i + 1) % 2][lane], layers + (i + 1) * FIELDS + lane);
    const Splits splits(position, (int)(u32)layer.fields[LENGTH_AND_WINDOW]);
#pragma unroll 1
    for (int task = splits.first_task(); task < splits.tasks(); task += PROGRAMS) {
      if (task != splits.first_task()) meet();  // all warps have put the task before together
      attend(p, layer, task, splits, qkv, parts, attended, tag, position, qk_eps, scale);
    }
    if (splits.n > 1) combine(p, layer, splits.n, parts, attended, tag);
    Product<Wo>::run<Product<Up>>(p, layer, WO, attended, tag, middle, tag);
#if CHOSEN
    add_to_logits(p, layer, logits);
    if (CHOOSES) choose_experts(p, layer, logits, route_scale);
#endif
    Product<Up>::run<Product<Down>>(p, layer, UP, middle, tag, gated, tag, nullptr,
                                    weight_behind(i, WO));
    wait_for_copies();
    if (!share_of(Sizes<Down>::ALL)) meet();  // else they meet within
    Product<Down>::run<Product<Qkv>>(p, layer, DOWN, gated, tag, ends, tag,
                                     i + 1 == LAYERS ? y : nullptr);
    if (BEHIND && i + 1 == LAYERS && blockIdx.x == 0) {
      u32 pairs[Product<Qkv>::ROUNDS][Product<Qkv>::INPUTS / 2];
      Product<Qkv>::add_branch(p, pairs, ends, tag, weight_behind(i, DOWN), y);
    }
  }
}
