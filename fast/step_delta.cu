// A recurrent layer's mixer, in attention's place: the gated delta rule of one token, number t of its
// block, with a state S [KEY_DIM, VALUE_DIM] from before the block and d the decays' sum,
//
//     u_t = beta_t (v_t - exp(d_t) S^T k_t - sum over s < t of exp(d_t - d_s) (k_t k_s) u_s)
//     y_t = exp(d_t) S^T q_t + sum over s <= t of exp(d_t - d_s) (q_t k_s) u_s
//
// then a norm of y_t and a gate by z_t. delta.py says more, model.DeltaCache what is kept of a text.

#if RECURRENT
constexpr int KEY_DIM = Delta::KEY_DIM, VALUE_DIM = Delta::VALUE_DIM;
// Where a token's channels lie in what In makes, and in a row of the ring of inputs: queries, keys
// and values. Behind them In has z, and the ring the gates b and a.
constexpr int OF_KEYS = Delta::KEY_HEADS * KEY_DIM, OF_VALUES = Delta::VALUE_HEADS * VALUE_DIM;
constexpr int CHANNELS = 2 * OF_KEYS + OF_VALUES, KEPT = CHANNELS + 2 * Delta::VALUE_HEADS;

// A task is a value head. What it needs of the text comes through the ring of slots, before the
// token itself is there:
//
//     STATE_SLOTS    the state before the token's block, SLOT_ROWS of [KEY_DIM, VALUE_DIM] each, fp32
//     one            keys of the block's earlier tokens [at, KEY_DIM], fp32
//     one            their corrections [at, VALUE_DIM], fp32
constexpr int SLOT_ROWS = 16 * 1024 / 4 / VALUE_DIM, STATE_SLOTS = KEY_DIM / SLOT_ROWS;
constexpr int DELTA_SLOTS = STATE_SLOTS + 2;
// Threads with the same column of the state have SPLIT_ROWS of its rows each.
constexpr int SPLITS = WARPS * 32 / VALUE_DIM, SPLIT_ROWS = KEY_DIM / SPLITS;
static_assert(KEY_DIM == 128 && VALUE_DIM == 128 && SPLIT_ROWS % SLOT_ROWS == 0);
static_assert(Delta::BLOCK == 32 && Delta::BLOCK * KEY_DIM * 4 <= SLOT && STAGES >= DELTA_SLOTS);
static_assert(Delta::TAPS > 1 && Delta::TAPS <= Delta::RING - 2 * Delta::BLOCK + 1);
static_assert(Product<In>::UNITS == Product<Qkv>::UNITS && In::BITS == Qkv::BITS,
              "words that enter a layer have one order");

struct DeltaTask {
  int h, key_head, block, at, row;  // the token is number `at` of its block; row: of the TOKENS kept
  bool stores_key;                   // of the value heads that have this key head, the first does
  __device__ __forceinline__ DeltaTask(int h, int position)
      : h(h), key_head(h / (Delta::VALUE_HEADS / Delta::KEY_HEADS)), block(position / Delta::BLOCK),
        at(position % Delta::BLOCK), row(position % Delta::TOKENS),
        stores_key(h % (Delta::VALUE_HEADS / Delta::KEY_HEADS) == 0) {}
  // The same of the block's s-th token.
  __device__ __forceinline__ int row_of(int s) const {
    return (block * Delta::BLOCK + s) % Delta::TOKENS;
  }
  __device__ __forceinline__ long long state(int block) const {  // its first number
    return (long long)(block % 2 * Delta::VALUE_HEADS + h) * KEY_DIM * VALUE_DIM;
  }
};

// The second half of the warps: b and a of the normed x, and the sum of x's squares. Each leaves its
// own units' sums. x: words with this tag or, if it is 0, a plain row.
__device__ __forceinline__ void gates_of(Program& p, const Layer& layer, int h, const u64* x,
                                         u32 tag) {
  typedef Product<In> P;
  constexpr int HALF = WARPS / 2, N = P::UNITS > HALF ? 2 : 1;  // units whose words a warp awaits
  const auto norm = layer.at<const P::Norm>(QKV * PER_PRODUCT + NORM_WEIGHT);
  const u16* weight = layer.at<const u16>(GATES) + (long long)h * D;
  float sums[3] = {};
#pragma unroll 1
  for (int first = p.warp - HALF; first < P::UNITS; first += N * HALF) {
    float gain[N][P::INPUTS];
    P::load_gains<N, HALF>(gain, norm, first, p.lane);
    u32 w[2][N * P::INPUTS / 2], pairs[N][P::INPUTS / 2];
#pragma unroll
    for (int i = 0; i < N * P::INPUTS / 2; i++) {
      const int unit = first + i / (P::INPUTS / 2) * HALF;
      const int k = P::input(unit, p.lane, i * 2 % P::INPUTS);
#pragma unroll
      for (int j = 0; j < 2; j++)
        w[j][i] = k < D ? *(const u32*)(weight + j * Delta::VALUE_HEADS * D + k) : 0;
    }
    P::await_units<N, HALF>(pairs, x, tag, first, p.lane);
#pragma unroll
    for (int i = 0; i < N * P::INPUTS / 2; i++) {
      const int n = i / (P::INPUTS / 2), in_unit = i % (P::INPUTS / 2);
      if (first + n * HALF >= P::UNITS) break;
      const float low = low_number(pairs[n][in_unit]), high = high_number(pairs[n][in_unit]);
      sums[2] += low * low + high * high;
#pragma unroll
      for (int j = 0; j < 2; j++)
        sums[j] += low * gain[n][2 * in_unit] * low_number(w[j][i]) +
                   high * gain[n][2 * in_unit + 1] * high_number(w[j][i]);
    }
  }
#pragma unroll
  for (int j = 0; j < 3; j++) {
    const float sum = all_lanes(sums[j], add);
    if (p.lane == 0) p.s->delta.gates[p.warp - HALF][j] = sum;
  }
}

// One warp adds what all of them left.
__device__ __forceinline__ void finish_gates(Program& p, const Layer& layer, const DeltaTask& m,
                                             int position, float log_a, float bias) {
  DeltaMemory& s = p.s->delta;
  float sums[3];
#pragma unroll
  for (int j = 0; j < 3; j++)
    sums[j] = all_lanes<WARPS / 2>(s.gates[p.lane % (WARPS / 2)][j], add);
  const float one = rsqrtf(sums[2] / D + p.eps);
  // As they are kept, so that it makes no difference in which forward a token is read.
  const u16 b = rounded(sums[0] * one), a = rounded(sums[1] * one);
  const float x = number(a) + bias;
  const float softplus = x > 20 ? x : logf(1 + __expf(x));
  const float decay = -__expf(log_a) * softplus;
  if (p.lane) return;
  s.beta = 1 / (1 + __expf(-number(b)));
  s.decayed = __expf(decay);
  u16* kept = layer.at<u16>(KEPT_INPUTS) + (long long)(position % Delta::RING) * KEPT + CHANNELS + m.h;
  kept[0] = b;
  kept[Delta::VALUE_HEADS] = a;
  layer.at<float>(DECAYS)[m.row * Delta::VALUE_HEADS + m.h] = decay;
}

// What of the state and of each earlier token's correction is left before this token: lane s has the
// decay of the block's s-th token.
__device__ __forceinline__ void sum_decays(Program& p, const DeltaTask& m, float decay) {
  DeltaMemory& s = p.s->delta;
  const int lane = p.lane;
  // The sum of what came after: as a difference of two sums it would lose digits.
  float since = __shfl_down_sync(~0u, decay, 1);
  if (lane == 31) since = 0;
#pragma unroll
  for (int o = 1; o < 32; o *= 2) {
    const float later = __shfl_down_sync(~0u, since, o);
    if (lane + o < 32) since += later;
  }
  s.since[lane] = lane < m.at ? __expf(since) : 0;
  if (lane == 0) s.from_start = __expf(since + decay);
}

// The token's query, key, value and z: channels as In makes them and, but for z, behind the
// convolution over the last TAPS tokens and SiLU. A lane of the first half of the warps has two
// neighbours.
__device__ __forceinline__ void convolve(Program& p, const Layer& layer, const DeltaTask& m,
                                         const u64* qkvz, u32 tag, int position) {
  constexpr int TAPS = Delta::TAPS, ALL = 2 * (KEY_DIM + VALUE_DIM);
  DeltaMemory& s = p.s->delta;
  u16* const inputs = layer.at<u16>(KEPT_INPUTS);
#pragma unroll 1
  for (int n = (p.warp * 32 + p.lane) * 2; n < ALL; n += WARPS / 2 * 64) {
    const bool is_key = n < 2 * KEY_DIM, is_z = n >= 2 * KEY_DIM + VALUE_DIM;
    const int channel =
        is_key ? n / KEY_DIM * OF_KEYS + m.key_head * KEY_DIM + n % KEY_DIM
               : 2 * OF_KEYS + is_z * OF_VALUES + m.h * VALUE_DIM + (n - 2 * KEY_DIM) % VALUE_DIM;
    u32 taps[TAPS] = {}, before[TAPS - 1] = {};
    if (!is_z) {
      const u32* filter = layer.at<const u32>(FILTER) + channel / 2 * TAPS;
#pragma unroll
      for (int i = 0; i < TAPS; i++) taps[i] = filter[i];
#pragma unroll
      for (int i = 0; i < TAPS - 1; i++) {
        const int t = position - (TAPS - 1 - i);  // before token 0 all is 0
        if (t >= 0)
          before[i] = *(const u32*)(inputs + (long long)(t % Delta::RING) * KEPT + channel);
      }
    }
    u32 pair[1];
    await(pair, qkvz, {channel / 2}, tag);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float x = 0, y = 0;
#pragma unroll
      for (int i = 0; i < TAPS; i++) {
        const int at = j * TAPS + i;
        const u32 of = i < TAPS - 1 ? before[i] : pair[0];
        x = j ? high_number(of) : low_number(of);
        y += x * (at & 1 ? high_number(taps[at / 2]) : low_number(taps[at / 2]));
      }
      y = number(rounded(y));  // as PyTorch rounds it
      s.made[n + j] = is_z ? x : number(rounded(y / (1 + __expf(-y))));
    }
    if (!is_z && (!is_key || m.stores_key))
      *(u32*)(inputs + (long long)(position % Delta::RING) * KEPT + channel) = pair[0];
  }
}

// Rows of the state before the block, from a multiple of SLOT_ROWS on.
__device__ __forceinline__ const float* state_at(const Program& p, int row) {
  return (const float*)p.slot(p.next_slot + row / SLOT_ROWS);
}

// The state behind the block, of which this token is the last.
__device__ __forceinline__ void put_state(Program& p, const Layer& layer, const DeltaTask& m) {
  const DeltaMemory& s = p.s->delta;
  const int thread = p.warp * 32 + p.lane, column = thread % VALUE_DIM, at = m.at;
  const float* keys = (const float*)p.slot(p.next_slot + STATE_SLOTS);
  const float* corrections = (const float*)p.slot(p.next_slot + STATE_SLOTS + 1);
  const float* own_key = s.made + KEY_DIM;
  const float own = rsqrtf(s.k_k + 1e-6f) * s.correction[column];
  float* to = layer.at<float>(STATES) + m.state(m.block + 1) + column;
  constexpr int ROWS = 16;
#pragma unroll 1
  for (int first = thread / VALUE_DIM * SPLIT_ROWS, i = 0; i < SPLIT_ROWS; i += ROWS) {
    const float* state = state_at(p, first + i) + (first + i) % SLOT_ROWS * VALUE_DIM + column;
    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) sums[r] = m.block ? s.from_start * state[r * VALUE_DIM] : 0;
#pragma unroll 1
    for (int t = 0; t < at; t++) {
      const float left = s.since[t] * corrections[t * VALUE_DIM + column];
#pragma unroll
      for (int r = 0; r < ROWS; r++) sums[r] += left * keys[t * KEY_DIM + first + i + r];
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      to[(first + i + r) * VALUE_DIM] = s.decayed * sums[r] + own * own_key[first + i + r];
  }
}

// A task. x: what enters the layer, words with x_tag or, if that is 0, a plain row. qkvz: In's words
// -> words of `out`, of one value head.
__device__ __forceinline__ void apply_delta(Program& p, const Layer& layer, int h, const u64* x,
                                            u32 x_tag, const u64* qkvz, u64* out, u32 tag,
                                            int position, float eps) {
  p.reload_ids();
  DeltaMemory& s = p.s->delta;
  const DeltaTask m(h, position);
  const int lane = p.lane, thread = p.warp * 32 + lane, at = m.at, column = thread % VALUE_DIM;
  const float *query = s.made, *key = query + KEY_DIM, *value = key + KEY_DIM, *z = value + VALUE_DIM;
  // Loaded before they are wanted, by all, though few do.
  const float log_a = layer.at<const float>(LOG_A)[h], bias = layer.at<const float>(DT_BIAS)[h];
  const float norm =
      any_number(layer.at<const NumberOf<Delta::FLOAT_NORM>::Type>(VALUE_NORM)[column]);
  const float decay =
      lane < at ? layer.at<const float>(DECAYS)[m.row_of(lane) * Delta::VALUE_HEADS + h] : 0;
  if (p.warp < WARPS / 2) {
    convolve(p, layer, m, qkvz, tag, position);
  } else {
    gates_of(p, layer, h, x, x_tag);
    if (p.warp == WARPS - 1) sum_decays(p, m, decay);
  }
  meet();

#pragma unroll 1
  for (int i = 0; i < DELTA_SLOTS; i++) {
    wait_for(p.s->held[(p.next_slot + i) % STAGES], p.next_slot + i);
    wait(&p.s->full[(p.next_slot + i) % STAGES], (p.next_slot + i) / STAGES & 1);
  }
  const float* keys = (const float*)p.slot(p.next_slot + STATE_SLOTS);
  const float* corrections = (const float*)p.slot(p.next_slot + STATE_SLOTS + 1);
  if (p.warp == WARPS - 1) finish_gates(p, layer, m, position, log_a, bias);
  // Products of the block's keys, the token's own at last, with the key and the query.
#pragma unroll 1
  for (int t = p.warp; t <= at && p.warp < WARPS - 1; t += WARPS - 1) {
    float of_key = 0, of_query = 0, squares = 0;
#pragma unroll
    for (int e = lane * 4; e < KEY_DIM; e += 128) {
      const float4 a = *(const float4*)((t < at ? keys + t * KEY_DIM : key) + e);
      const float4 k = *(const float4*)(key + e), q = *(const float4*)(query + e);
      of_key += a.x * k.x + a.y * k.y + a.z * k.z + a.w * k.w;
      of_query += a.x * q.x + a.y * q.y + a.z * q.z + a.w * q.w;
      squares += q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
    }
    of_key = all_lanes(of_key, add);
    of_query = all_lanes(of_query, add);
    if (t < at) {
      if (lane == 0) s.of_key[t] = s.since[t] * of_key, s.of_query[t] = s.since[t] * of_query;
    } else {
      squares = all_lanes(squares, add);
      if (lane == 0) s.k_k = of_key, s.k_q = of_query, s.q_q = squares;
    }
  }
  meet();
  {  // What state and corrections make of the key and of the query.
    const int split = thread / VALUE_DIM, first = split * SPLIT_ROWS;
    // Before the first block the state is 0, whatever lies there.
    const int end = m.block ? first + SPLIT_ROWS : first;
    float of_key = 0, of_query = 0;
#pragma unroll 1
    for (int begin = first; begin < end; begin += SLOT_ROWS) {
      const float* state = state_at(p, begin) + column;
#pragma unroll 2
      for (int i = 0; i < SLOT_ROWS; i += 4, state += 4 * VALUE_DIM) {
        const float4 k = *(const float4*)(key + begin + i), q = *(const float4*)(query + begin + i);
        const float rows[4] = {state[0], state[VALUE_DIM], state[2 * VALUE_DIM],
                               state[3 * VALUE_DIM]};
        of_key += rows[0] * k.x + rows[1] * k.y + rows[2] * k.z + rows[3] * k.w;
        of_query += rows[0] * q.x + rows[1] * q.y + rows[2] * q.z + rows[3] * q.w;
      }
    }
    of_key *= s.from_start;
    of_query *= s.from_start;
#pragma unroll 1
    for (int t = split; t < at; t += SPLITS) {
      const float correction = corrections[t * VALUE_DIM + column];
      of_key += s.of_key[t] * correction;
      of_query += s.of_query[t] * correction;
    }
    s.found[split][0][column] = of_key;
    s.found[split][1][column] = of_query;
  }
  meet();

  float y = 0, gate = 0;
  const float unit_k = rsqrtf(s.k_k + 1e-6f);  // key and query have unit length
  if (thread < VALUE_DIM) {
    float of_key = 0, of_query = 0;
#pragma unroll
    for (int i = 0; i < SPLITS; i++) {
      of_key += s.found[i][0][column];
      of_query += s.found[i][1][column];
    }
    const float unit_q = rsqrtf(s.q_q + 1e-6f) * rsqrtf((float)KEY_DIM);
    const float u = s.beta * (value[column] - s.decayed * unit_k * of_key);
    s.correction[column] = u;
    layer.at<float>(CORRECTIONS)[(m.row * Delta::VALUE_HEADS + h) * VALUE_DIM + column] = u;
    y = unit_q * (s.decayed * of_query + s.k_q * unit_k * u);
    gate = z[column];
    const float squares = all_lanes(y * y, add);
    if (lane == 0) s.squares[p.warp] = squares;
  }
  if (m.stores_key && thread < KEY_DIM)
    layer.at<float>(KEYS)[(m.row * Delta::KEY_HEADS + m.key_head) * KEY_DIM + thread] =
        unit_k * key[thread];
  meet();  // all have read the slots, and what the next task writes
  if (thread < VALUE_DIM) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < VALUE_DIM / 32; i++) squares += s.squares[i];
    y *= rsqrtf(squares / VALUE_DIM + eps) * norm * __fdividef(gate, 1 + __expf(-gate));
    const float next = __shfl_down_sync(~0u, y, 1);
    if (!(lane & 1))
      poke(out + Product<Wo>::word(0, h * VALUE_DIM + column), word_of(pair_of(y, next), tag));
  }
  if (at == Delta::BLOCK - 1) {
    put_state(p, layer, m);
    meet();
  }
  if (p.warp == 0 && lane < DELTA_SLOTS)
    arrive_for(&p.s->empty[(p.next_slot + lane) % STAGES], SQUAD_WARPS);
  p.next_slot += DELTA_SLOTS;
}
#endif
