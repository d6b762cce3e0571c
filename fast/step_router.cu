// A mixture's router: logits as sums that all programs add to, and the choice of experts.

#if CHOSEN
// A router's logits are sums over the residual stream, of which each program has some elements: it
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
  const int my_tiles = share_of(STREAM_TILES), lane = p.lane, quarter = lane & 3;
  if (!my_tiles) return;
  const u16* weight = layer.at<const u16>(ROUTER * PER_PRODUCT + CODES);
  const Norm* norm = layer.at<const Norm>(ROUTER * PER_PRODUCT + NORM_WEIGHT);
  const int e_here = p.warp * 8 + (lane >> 2), k_here = (int)blockIdx.x * 16 + quarter * 4;
  // A lane's weights of all its experts, so that none of them is waited for alone.
  constexpr int ROUNDS = (X + WARPS * 8 - 1) / (WARPS * 8);
  uint2 w[ROUNDS];
  const auto load = [&](int k) {
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const long long e = min(e_here + i * WARPS * 8, X - 1);
      w[i] = k < D ? *(const uint2*)(weight + e * D + k) : uint2{0, 0};
    }
  };
  load(k_here);
  const float one = 1 / stream_unit(p), scale = one * (1 << LOGIT_BITS);
  u64* sums = logits + (s.odd * COPIES + blockIdx.x % COPIES) * SUMS;
  meet();  // the rows are there
#pragma unroll 1
  for (int t = 0; t < my_tiles; t++) {
    const int k = k_here + t * PROGRAMS * 16;
    if (t) load(k);
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
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const int e = e_here + i * WARPS * 8;
      if (e - (lane >> 2) >= X) break;
      float y = low_number(w[i].x) * rows.x + high_number(w[i].x) * rows.y +
                low_number(w[i].y) * rows.z + high_number(w[i].y) * rows.w;
      y += __shfl_xor_sync(~0u, y, 1);
      y += __shfl_xor_sync(~0u, y, 2);
      if (quarter == 0 && e < X) add_number(sums + e, y * scale);
    }
  }
}

// What the n-th sum of a copy has grown by. All lanes of a warp call this together.
__device__ __forceinline__ float await_sum(Program& p, const u64* sums, int n, u64& previous) {
  for (int tries = 0;; tries++) {
    u64 grown = -previous;
#pragma unroll
    for (int c = 0; c < COPIES; c++) grown += peek(sums + c * SUMS + n);
    if (all_there((grown & (1 << COUNT_BITS) - 1) == STREAM_TILES)) {
      previous += grown;
      const long long sum = (long long)grown >> COUNT_BITS;
      return sum < 1ll << BAD_BIT - 1 ? (float)sum : __uint_as_float(0x7fc00000);
    }
    give_up_after(tries);
  }
}

// Numbers in the order of the logits, and back.
__device__ __forceinline__ int key_of(float logit) {
  const int bits = __float_as_uint(logit);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ __forceinline__ float logit_of(int key) {
  return __uint_as_float(key ^ (key >> 31 & 0x7fffffff));
}

// How many of these come before number n: the larger ones and, of equal ones, those with lower
// numbers. `of` is a multiple of four.
__device__ __forceinline__ int rank_of(const int* keys, int of, int n) {
  const int mine = keys[n], own_four = n & ~3;
  int before = 0;
#pragma unroll 4
  for (int i = 0; i < of; i += 4) {
    const int4 four = *(const int4*)(keys + i);
    const int least = i < own_four ? mine - 1 : mine;
    before += four.x > least;
    before += four.y > least;
    before += four.z > least;
    before += four.w > least;
  }
#pragma unroll
  for (int j = 0; j < 3; j++) before += own_four + j < n && keys[own_four + j] == mine;
  return before;
}

// The experts with the largest logits, of equal ones those with the lowest numbers, and their
// weights. A NaN among the logits makes all weights NaN. Each warp ranks 32 experts, of which the
// first CHOSEN are candidates, and then 32 of all candidates. A shared expert (Router.shared in
// experts.py) is the last of the router's rows, and is always taken, after the chosen ones. The first
// warp writes the weights last: others may read them after their next meet().
__device__ __forceinline__ void choose_experts(Program& p, const Layer& layer, const u64* logits,
                                               float scale) {
  constexpr int X = RouterOp::N;
  p.reload_ids();
  Shared& s = *p.s;
  const int lane = p.lane;
  bool nan = false;
  u64 new_squares = 0;
  if (p.warp * 32 < X) {
    const float unit = stream_unit(p);
    const u16* bias = layer.at<const u16>(ROUTER * PER_PRODUCT + BIASES);
    const u64* sums = logits + s.odd * COPIES * SUMS;
    // First the squares alone: asking for all words delays those who still add.
    u64 previous_squares = s.previous[X];
    const float squares = await_sum(p, sums, X, previous_squares);
    const float one =
        rsqrtf(squares * unit * unit / (1 << SQUARES_BITS) / D + p.eps) * unit / (1 << LOGIT_BITS);
#pragma unroll 1
    for (int e = p.warp * 32 + lane; e - lane < X; e += WARPS * 32) {
      const int n = min(e, X - 1);
      u64 previous = s.previous[n];
      float logit = await_sum(p, sums, n, previous) * one;
      __syncwarp();  // all have read before one writes
      if (RouterOp::BIAS) logit += number(bias[n]);
      if (e < X) s.previous[e] = previous;
      nan |= logit != logit;
      s.keys[e] = e < CHOICES && logit == logit ? key_of(logit) : LOWEST;
      __syncwarp();
      const int rank = rank_of(s.keys + (e - lane), 32, lane);
      if (e - lane < CHOICES && rank < CHOSEN) {
        s.candidates[e / 32 * CANDIDATES_OF_32 + rank] = s.keys[e];
        s.numbers[e / 32 * CANDIDATES_OF_32 + rank] = e;
      }
      if (SHARED && e == CHOICES) {
        s.experts[CHOSEN] = e;
        s.weights[CHOSEN] = SHARED == 1 ? 1 / (1 + exp2f(-logit * LOG2_E)) : 1;
      }
    }
    new_squares = previous_squares;
  }
  nan = meet_any(nan);
  if (p.warp == 0 && lane == 0) s.previous[X] = new_squares;
#pragma unroll 1
  for (int first = p.warp * 32; first < CANDIDATES; first += WARPS * 32) {
    const int n = min(first + lane, CANDIDATES - 1);
    const int rank = rank_of(s.candidates, CANDIDATES, n);
    if (rank < CHOSEN) {
      s.experts[rank] = s.numbers[n];
      s.weights[rank] = logit_of(s.candidates[n]);
    }
  }
  meet();
  if (p.warp == 0) {
    if (lane == 0) arrive(&s.chosen);
    const float top = s.weights[0];
    const float share = lane < CHOSEN ? exp2f((s.weights[lane] - top) * LOG2_E) : 0;
    float all = NORMALIZE ? share : 0;
    if (!NORMALIZE)
      for (int e = lane; e < CHOICES; e += 32) all += exp2f((logit_of(s.keys[e]) - top) * LOG2_E);
    all = all_lanes(all, add);
    __syncwarp();
    if (lane < CHOSEN) s.weights[lane] = share / all * scale;
    if (nan && lane < CHOSEN + (SHARED > 0)) s.weights[lane] = __uint_as_float(0x7fc00000);
  }
}
#endif
