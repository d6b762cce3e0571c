// What the pieces of step.cu share: words, a layer's numbers, sizes of products, a program's memory.
// In front of it stands common.cu, and in front of that the table that step.py writes: BF16, D,
// LAYERS, HEADS, KV_HEADS, HEAD_DIM, INT8_CACHE, TURNED, OUTPUT_GATE, QK_NORM, FLOAT_QK_NORM, SINKS,
// POST_NORMS, CHOSEN, SHARED, NORMALIZE, RECURRENT, RANKS, WARPS, PROGRAMS, MEMORY, IN_FLIGHT,
// IN_FLIGHT_WAITING, TRIES, and a struct for each product: Qkv, Wo, Up, Down, of a mixture RouterOp
// and, if RECURRENT (some layers are recurrent), In and Delta, which is the mixer's.

constexpr int SQUAD_WARPS = 8, SQUADS = WARPS / SQUAD_WARPS;  // warps that share a slot
constexpr int LARGEST_SPLITS = 32;  // programs that share the positions of a kv head
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
// The same of words that one GPU of the host writes and another one reads.
__device__ __forceinline__ u64 peek_across(const u64* p) {
  u64 y;
  asm volatile("ld.relaxed.sys.b64 %0, [%1];" : "=l"(y) : "l"(p) : "memory");
  return y;
}
__device__ __forceinline__ void poke_across(u64* p, u64 y) {
  asm volatile("st.relaxed.sys.b64 [%0], %1;" ::"l"(p), "l"(y) : "memory");
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
// A box of rows of 128 bytes, as Step.maps_of() in step.py describes it, from a row (or position)
// on. Of weights y is the unit and z the expert; of a cache y is the kv head and z the 128-byte part.
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

// A program that waits too long for a word traps: after that the process cannot use the GPU any
// more. It does not where ranks share the step: another rank may begin it at any time later, for
// example while its output is blocked. If a rank dies, torchrun ends the others.
__device__ __forceinline__ void give_up_after(int tries) {
  if (RANKS == 1 && tries > TRIES) give_up();
}

// Waits for words at p + at[i] with this tag, and keeps their values. All lanes of a warp call this
// together; at[i] < 0: this lane wants none. ACROSS: other ranks write them.
template <bool ACROSS = false, int N>
__device__ __forceinline__ void await(u32 (&values)[N], const u64* p, const int (&at)[N], u32 tag) {
  for (int tries = 0;; tries++) {
    bool there = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
      const u64 word = at[i] < 0 ? word_of(0, tag) : ACROSS ? peek_across(p + at[i]) : peek(p + at[i]);
      values[i] = (u32)word;
      there &= (u32)(word >> 32) == tag;
    }
    if (all_there(there)) return;
    give_up_after(tries);
  }
}

// A layer's numbers in memory, 8 bytes each, in this order: Step.fields() in step.py writes them.
// CODES: of 16-bit weights the address of their tensor map; of the router the weights. NORM_WEIGHT:
// of Wo and Down, if POST_NORMS, of the norm after them. A recurrent layer has no K_MAP and, in place
// of what attention has before it, the second list; its product In is QKV.
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
  LENGTH_AND_WINDOW,  // the cache's positions in the high half
  K_MAP,
  V_MAP,
  DECAYS,  // these two are of a recurrent layer; attention has the scales of an int8 cache here
  CORRECTIONS,
  FIELDS
};
enum { FILTER = K_CACHE, LOG_A, DT_BIAS, VALUE_NORM, GATES, KEPT_INPUTS, STATES, KEYS };
enum { K_SCALES = DECAYS, V_SCALES };  // of an int8 cache, in places that attention does not use
static_assert(FIELDS <= 32 && KEYS < K_MAP, "a lane copies one");

struct Layer {
  const u64* fields;  // in shared memory
  template <class T>
  __device__ __forceinline__ T* at(int field) const {
    return (T*)fields[field];
  }
  __device__ __forceinline__ bool is_recurrent() const { return RECURRENT && !fields[K_MAP]; }
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

// What follows from a product's struct O: BITS, E2M1, E4M3, K, N (of its outputs), GROUP (0: one a
// row), PARTS (groups of a block, each with a scale), FLOAT_SCALES, SHARED_ROWS (8 rows have one
// scale), EIGHT_ROWS (of a tile), GATED (1: SiLU, 2: GELU by tanh, 3: MoEConfig.clamp's), EXPERTS,
// NORM (before it), FLOAT_NORM, BIAS, RESIDUAL and ROW_PARALLEL (each rank has some of the inputs).
//
// A block is 1 KiB, BLOCK inputs of a tile's TILE_ROWS rows, and a chunk has the rows' scales for
// PER_CHUNK blocks. A unit is two blocks, what a warp multiplies at once. SUMMED is Down of a
// mixture: its row is the chosen experts' rows one behind the other. SETS: groups of inputs in a
// block, each with a sum of its own. TILES: of TILE_ROWS rows of w, 8 of either half if GATED; ALL:
// of all chosen experts. Of Qwen3-30B-A3B in int4, groups of 128: Up has K 2048, 8 units a row, 96
// tiles an expert and 768 in all; Down has K 768, 3 units a row, 24 in a row of all experts, and 128
// tiles.
//
// 16-bit weights of a layer's first product have EIGHT_ROWS, and of a dense layer's Wo and Down. The
// first of Qwen3-30B-A3B has 5,120 outputs: of 320 tiles of 16 rows some of 132 programs would have
// three, and the others wait for them with two; of 640 tiles they have four or five.
template <class O>
struct Sizes {
  static constexpr bool PLAIN = O::BITS == 16, GROUPED = O::GROUP > 0;
  static constexpr int TILE_ROWS = O::EIGHT_ROWS ? 8 : 16;
  static constexpr int BLOCK = 1024 * 8 / TILE_ROWS / O::BITS, BLOCKS = (O::K + BLOCK - 1) / BLOCK;
  static_assert(!O::EIGHT_ROWS || PLAIN && !O::GATED && !O::EXPERTS);
  static constexpr int PER_CHUNK = O::GROUP > BLOCK ? O::GROUP / BLOCK : 1;
  static constexpr int CHUNKS = GROUPED ? (BLOCKS + PER_CHUNK - 1) / PER_CHUNK : 1;
  static constexpr bool BYTE_SCALES = O::E2M1 && !O::FLOAT_SCALES;
  static constexpr int CHUNK_SCALES = O::SHARED_ROWS ? 2 : 16 * O::PARTS;
  static constexpr int CHUNK_BYTES = (BYTE_SCALES ? 1 : 4) * CHUNK_SCALES;
  static constexpr int UNIT_INPUTS = 2 * BLOCK, ROW_UNITS = (BLOCKS + 1) / 2;
  static constexpr bool SUMMED = O::EXPERTS && !O::GATED;
  static constexpr int UNITS = ROW_UNITS * (SUMMED ? O::EXPERTS : 1);
  static constexpr int TILE_SLOTS = (UNITS + SQUAD_WARPS - 1) / SQUAD_WARPS;  // of the ring
  // Chunks of a unit in a slot, and one more for the slot's first row, which may begin within a
  // chunk. Of SHARED_ROWS a unit is a chunk, the scales of rows 0 to 7 and 8 to 15. Copies begin and
  // end at multiples of 16 bytes, which two of these have.
  static constexpr int UNIT_CHUNKS = PER_CHUNK > 1 ? 1 : 2;
  static constexpr int MORE_CHUNKS = PER_CHUNK > 1 && !O::SHARED_ROWS;
  static_assert(!O::SHARED_ROWS || PER_CHUNK == 2 && CHUNKS % 2 == 0);
  // If PLAIN: neighbours that one copy takes, as they belong to the same row.
  static constexpr int COPY_UNITS = SUMMED ? divisor(ROW_UNITS, SQUAD_WARPS) : SQUAD_WARPS;
  static constexpr int CODE_BYTES = SQUAD_WARPS * 2048;
  static constexpr int SLOT =
      CODE_BYTES +
      (GROUPED && !PLAIN ? (SQUAD_WARPS * UNIT_CHUNKS + MORE_CHUNKS) * CHUNK_BYTES : 0);
  // For weights of 16 bits or e4m3 an input of 16 bits is one term, and its product with a norm's
  // weight of 16 bits the sum of two; with one of fp32 three terms have its 24 bits.
  static constexpr int TERMS = !O::NORM ? 1 : O::FLOAT_NORM ? 3 : 2;
  // Of a unit of x a lane has so many inputs, which become so many words of digits or terms.
  static constexpr int INPUTS = PLAIN ? 32 / TILE_ROWS : O::BITS == 4 ? 8 : 4;
  static constexpr int DIGIT_WORDS = PLAIN ? TERMS * INPUTS / 2 : O::BITS == 4 || O::E4M3 ? 8 : 4;
  static constexpr bool DIGITS = !PLAIN && !O::E4M3;  // inputs become digits, not terms
  static constexpr int SETS = PLAIN ? 1 : O::PARTS;
  static constexpr int TILE_OUTPUTS = O::GATED ? 8 : TILE_ROWS;
  static constexpr int TILES = (O::N + TILE_OUTPUTS - 1) / TILE_OUTPUTS;  // of an expert
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
#if RECURRENT
#define OPERATIONS Qkv, In, Wo, Up, Down
#else
#define OPERATIONS Qkv, Wo, Up, Down
#endif
// Tiles of the product that a layer begins with: of Qkv and In the fewer.
#if RECURRENT
constexpr int FEWEST_FIRST = smallest(Sizes<Qkv>::ALL, Sizes<In>::ALL);
#else
constexpr int FEWEST_FIRST = Sizes<Qkv>::ALL;
#endif
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
// A head's values are slices of 64 columns, of which attention's tasks have one or, of longer
// texts, WIDE. A slot of the ring has CACHE_ROWS positions of the cache, SLOT_TILES times the 16
// that a warp takes at once: KEY_BYTES of keys, and VALUE_BYTES of each slice of the values. Of an
// int8 cache VALUE_BYTES hold two slices side by side. Behind them are SLOT_SCALES scales of keys,
// and as many of values: of the slot's positions, and of up to four others around them, as copies
// begin and end at multiples of 16 bytes.
constexpr int COLUMNS = 64, COLUMN_SLICES = HEAD_DIM / COLUMNS, WIDE = smallest(2, COLUMN_SLICES);
constexpr int CACHE_ROWS = 4096 / HEAD_DIM, SLOT_TILES = CACHE_ROWS / 16;
constexpr int KEY_BYTES = CACHE_ROWS * HEAD_DIM * (INT8_CACHE ? 1 : 2);
constexpr int VALUE_BYTES = CACHE_ROWS * COLUMNS * 2, SLOT_SCALES = CACHE_ROWS + 4;
static_assert(!INT8_CACHE || HEAD_DIM % 128 == 0);
constexpr int PASS = 16 * WARPS;  // positions of the cache that all warps take at once
// A box lies in rows of 128 bytes, and 16-byte part i of a row at place i ^ row % 8
// (CU_TENSOR_MAP_SWIZZLE_128B). Eight lanes that read at once have the same four parts of two rows:
// in rows that differ in bit 2 these lie in different banks, and far_apart() orders rows so.
__device__ __forceinline__ int far_apart(int row) { return row ^ (row & 1) << 2; }
__device__ __forceinline__ uint4 part_of(const unsigned char* box, int row, int part) {
  return *(const uint4*)(box + row * 128 + ((part ^ row) & 7) * 16);
}
// Eight codes of an int8 cache as numbers of 16 bits, which hold each code exactly.
__device__ __forceinline__ uint4 widened(uint2 codes) {
  const u32 shifted[2] = {codes.x ^ 0x80808080u, codes.y ^ 0x80808080u};  // + 128: 0 to 255
  float y[8];
#pragma unroll
  for (int i = 0; i < 8; i++)  // the bits of 2^23 + 128 + code; 2^23 + 128 is taken off again
    y[i] = __uint_as_float(__byte_perm(shifted[i / 4], 0x4B000000u, 0x7440 + i % 4)) - 8388736.0f;
  return {pair_of(y[0], y[1]), pair_of(y[2], y[3]), pair_of(y[4], y[5]), pair_of(y[6], y[7])};
}
// Numbers 8 n to 8 n + 7 of a row of a box of the cache, whose 128 bytes have 64 numbers or, in
// int8, 128.
__device__ __forceinline__ uint4 eight_of(const unsigned char* box, int row, int n) {
  if (!INT8_CACHE) return part_of(box, row, n);
  const uint4 part = part_of(box, row, n >> 1);
  return widened(n & 1 ? uint2{part.z, part.w} : uint2{part.x, part.y});
}

#if RECURRENT
// What the warps of a recurrent layer's mixer tell each other (step_delta.cu).
struct DeltaMemory {
  // Of the value head its key head's query and key, and its value and z.
  alignas(16) float made[2 * Delta::KEY_DIM + 2 * Delta::VALUE_DIM];
  // S^T k and S^T q of a share of the state's rows, and what a share of the corrections adds.
  alignas(16) float found[WARPS * 32 / Delta::VALUE_DIM][2][Delta::VALUE_DIM];
  alignas(16) float correction[Delta::VALUE_DIM];
  // Of the block's earlier tokens: the decay since then, and their keys times the token's key and
  // query, times that decay.
  float since[Delta::BLOCK], of_key[Delta::BLOCK], of_query[Delta::BLOCK];
  float from_start;              // what is left of the state
  float gates[WARPS / 2][3];     // a warp's sums: of b, of a, and of the squares of x
  float beta, decayed;           // decayed: exp(decay)
  float k_k, k_q, q_q;           // dot products of the token's key and query
  float squares[Delta::VALUE_DIM / 32];
};
#endif

#if CHOSEN
constexpr int CHOICES = RouterOp::N - (SHARED > 0), CANDIDATES_OF_32 = (CHOSEN + 3) / 4 * 4;
constexpr int CANDIDATES = (CHOICES + 31) / 32 * CANDIDATES_OF_32;
constexpr int LOWEST = -0x7ffffffe, NO_KEY = LOWEST - 1;  // below all numbers' keys
#endif

// A program's shared memory but for the ring.
struct Shared {
  alignas(16) unsigned char inputs[largest_of<DigitBytes, OPERATIONS>()];
  alignas(16) float sums[MOST_UNITS][4][4];  // of x, as the digits' columns have them
  float scale[MOST_UNITS];  // what a unit's digits count
  float offset[MOST_UNITS], squares[MOST_UNITS];
  float branch_squares[POST_NORMS ? MOST_UNITS : 1];
  // If POST_NORMS and KEEPS_STREAM, all of the residual stream.
  alignas(16) u16 stream[POST_NORMS ? D : 8];
  float all_offsets, factor;  // of a product's units; the norm's
  float entering;             // the mean of the squares of what enters a layer, plus eps
  float partial[MOST_TILES][WARPS][16];
  // The residual stream of this program's tiles, over all layers: Wo and Down have the same tiles.
  alignas(16) float residual[TilesHere<Wo>::value][16];
  union {
    alignas(16) float attended[WARPS][QUERIES][64 + 4];  // 4 for the banks' sake
#if RECURRENT
    DeltaMemory delta;
#endif
  };
  // Queries, and the new key and value. With an int8 cache k and v hold codes, a byte each, and
  // new_scales their scales.
  alignas(16) u16 q[QUERIES][HEAD_DIM], k[HEAD_DIM], v[HEAD_DIM];
  float new_scales[2];
  float largest[QUERIES][WARPS], total[QUERIES][WARPS];
  int experts[32];
  float weights[32];
#if CHOSEN
  u64 previous[RouterOp::N + 1];  // its sums, as the layer before left them
  alignas(16) int keys[(RouterOp::N + 31) / 32 * 32];  // ordered as the logits are
  // Of each 32 experts those that may be chosen, filled up with NO_KEY to CANDIDATES_OF_32; their
  // numbers.
  alignas(16) int candidates[CANDIDATES], numbers[CANDIDATES];
#endif
  u32 tag;
  int odd;                 // whether the step's number is
  int is_first;            // whether the step is the first of its model
  volatile int streaming;  // whether this program's warps multiply
  u64 full[32], empty[32], chosen;
  volatile int held[32];  // of each place of the ring, the number of the slot that has it
  u64* rank_words[RANKS];    // in each rank's memory: see sum_of_ranks()
  int rank;                  // this one
  u64 fields[2][2][FIELDS];  // the producer's, and the others'; of layers with even and odd numbers
};
constexpr int STAGES = (MEMORY - (int)sizeof(Shared) - 256) / SLOT < 32
                           ? (MEMORY - (int)sizeof(Shared) - 256) / SLOT
                           : 32;
// A barrier's parity tells the n-th use of a place of the ring from the next use, but not from the
// one after that. So slot n - STAGES, which had the same place, must have landed when a squad begins
// to wait for slot n. Where the squad had no slot of this product yet, all slots of the products
// before have landed, as all warps have met since. Else it had one from n - 2 * SQUADS on (its slots
// are SQUADS apart or fewer, and up to 2 * SQUADS - 1 where a tile ends), and when that was asked for,
// all but IN_FLIGHT - 1 of the slots before it had landed.
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
// How many of `all` this program has: that of its number, and every PROGRAMS-th one after it.
__device__ __forceinline__ int share_of(int all) {
  const int n = blockIdx.x;
  return n < all ? (all - 1 - n) / PROGRAMS + 1 : 0;
}

// Output n of Wo or Down, of which each rank has some inputs: the sum of all ranks' y. All add in
// the ranks' order, and so get the same bits.
//
// s.rank_words[r] is in rank r's memory, and has what the others send to it: words [2, RANKS, D], of
// Wo and of Down, a row for each sender. On each rank the same program has a tile, and tags agree, as
// all ranks launch the same steps. No word is written over too early: a rank sends Wo's of the next
// layer after it has read Down's of this one, which the receiver sent after it had read Wo's of this
// one. Of Down's it is the same.
//
// As many lanes as a tile has rows have an output each; what the other lanes get is not used.
template <bool OF_DOWN>
__device__ __forceinline__ float sum_of_ranks(const Program& p, int n, float y, u32 tag) {
  const auto place = [&](int rank) { return (OF_DOWN * RANKS + rank) * D + n; };
  const bool there = p.lane < Sizes<Wo>::TILE_ROWS && n < D;
  u64* const* memory = p.s->rank_words;
  const int own = p.s->rank;
#pragma unroll
  for (int i = 1; i < RANKS; i++)
    if (there)
      poke_across(memory[(own + i) % RANKS] + place(own), word_of(__float_as_uint(y), tag));
  u32 received[RANKS];
  int at[RANKS];
#pragma unroll
  for (int r = 0; r < RANKS; r++) at[r] = there && r != own ? place(r) : -1;
  await<true>(received, memory[own], at, tag);
  float sum = 0;
#pragma unroll
  for (int r = 0; r < RANKS; r++) sum += r == own ? y : __uint_as_float(received[r]);
  return sum;
}
