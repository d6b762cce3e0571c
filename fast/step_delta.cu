// A recurrent layer's mixer, in attention's place: the gated delta rule of one token. delta.py has the
// formulas, model.DeltaCache says what is kept of a text.

#if MIXERS
constexpr int KEY_DIM = Delta::KEY_DIM, VALUE_DIM = Delta::VALUE_DIM;
// Where a token's channels lie in what In makes, and in a row of the ring of inputs: queries, keys and
// values. Behind them In has z, and the ring the gates b and a.
constexpr int OF_KEYS = Delta::KEY_HEADS * KEY_DIM, OF_VALUES = Delta::VALUE_HEADS * VALUE_DIM;
constexpr int CHANNELS = 2 * OF_KEYS + OF_VALUES, KEPT = CHANNELS + 2 * Delta::VALUE_HEADS;

// A task is a value head. What it needs of the text comes through the ring of slots, before the token
// itself is there:
//
//     STATE_SLOTS    the state before the token's block, SLOT_ROWS of [KEY_DIM, VALUE_DIM] each, fp32
//     one            keys of the block's earlier tokens [at, KEY_DIM], fp32
//     one            their corrections [at, VALUE_DIM], fp32
constexpr int SLOT_ROWS = 16 * 1024 / 4 / VALUE_DIM, STATE_SLOTS = KEY_DIM / SLOT_ROWS;
constexpr int MIXER_SLOTS = STATE_SLOTS + 2;
// Threads with the same column of the state have SPLIT_ROWS of its rows each.
constexpr int SPLITS = WARPS * 32 / VALUE_DIM, SPLIT_ROWS = KEY_DIM / SPLITS;
static_assert(KEY_DIM % 128 == 0 && VALUE_DIM == 128 && SPLIT_ROWS % SLOT_ROWS == 0);
static_assert(Delta::BLOCK == 32 && Delta::BLOCK * KEY_DIM * 4 <= SLOT && STAGES >= MIXER_SLOTS);
static_assert(Product<In>::UNITS == Product<Qkv>::UNITS && In::BITS == Qkv::BITS,
              "words that enter a layer have one order");

struct Mixer {
  int h, key_head, block, at, slot;  // the token is number `at` of its block; slot: of TOKENS
  bool stores_key;                   // of the value heads that have this key head, the first does
  __device__ __forceinline__ Mixer(int h, int position)
      : h(h), key_head(h / (Delta::VALUE_HEADS / Delta::KEY_HEADS)), block(position / Delta::BLOCK),
        at(position % Delta::BLOCK), slot(position % Delta::TOKENS),
        stores_key(h % (Delta::VALUE_HEADS / Delta::KEY_HEADS) == 0) {}
  // Of the block's s-th token, its place among TOKENS.
  __device__ __forceinline__ int place(int s) const {
    return (block * Delta::BLOCK + s) % Delta::TOKENS;
  }
  __device__ __forceinline__ long long state(int block) const {  // its first number
    return (long long)(block % 2 * Delta::VALUE_HEADS + h) * KEY_DIM * VALUE_DIM;
  }
};

// A warp's part of the normed x times two rows of a weight, and of the squares of x. x: words with
// this tag or, if it is 0, a plain row.
__device__ __forceinline__ void gates_of(Program& p, const Layer& layer, int h, const u64* x,
                                         u32 tag) {
  typedef Product<In> P;
  const auto norm = layer.at<const P::Norm>(QKV * PER_PRODUCT + NORM_WEIGHT);
  const u16* weight = layer.at<const u16>(GATES);
  float sums[3] = {};
#pragma unroll 1
  for (int unit = p.warp; unit < P::UNITS; unit += WARPS) {
    float gain[1][P::INPUTS];
    P::load_gains(gain, norm, unit, p.lane);
    u32 w[2][P::INPUTS / 2], pairs[1][P::INPUTS / 2];
#pragma unroll
    for (int i = 0; i < P::INPUTS; i++) {
      const int k = P::input(unit, p.lane, i & ~1);
      const u16* row = weight + (long long)(i % 2 * Delta::VALUE_HEADS + h) * D;
      w[i % 2][i / 2] = k < D ? *(const u32*)(row + k) : 0;
    }
    P::await_units(pairs, x, tag, unit, p.lane);
#pragma unroll
    for (int i = 0; i < P::INPUTS / 2; i++) {
      const float low = low_number(pairs[0][i]), high = high_number(pairs[0][i]);
#pragma unroll
      for (int j = 0; j < 2; j++)
        sums[j] += low * gain[0][2 * i] * low_number(w[j][i]) +
                   high * gain[0][2 * i + 1] * high_number(w[j][i]);
      sums[2] += low * low + high * high;
    }
  }
#pragma unroll
  for (int j = 0; j < 3; j++) {
    const float sum = all_lanes(sums[j], add);
    if (p.lane == 0) p.s->mixing.gates[p.warp][j] = sum;
  }
}

// All gates' parts are there. One warp calls this.
__device__ __forceinline__ void finish_gates(Program& p, const Layer& layer, const Mixer& m,
                                             int position) {
  Mixing& s = p.s->mixing;
  float sums[3];
#pragma unroll
  for (int j = 0; j < 3; j++) sums[j] = all_lanes(p.lane < WARPS ? s.gates[p.lane][j] : 0.0f, add);
  const float one = rsqrtf(sums[2] / D + p.eps);
  // As they are kept, so that it makes no difference in which forward a token is read.
  const u16 b = rounded(sums[0] * one), a = rounded(sums[1] * one);
  const float x = number(a) + layer.at<const float>(DT_BIAS)[m.h];
  const float softplus = x > 20 ? x : logf(1 + __expf(x));
  const float decay = -__expf(layer.at<const float>(LOG_A)[m.h]) * softplus;
  if (p.lane) return;
  s.beta = 1 / (1 + __expf(-number(b)));
  s.decayed = __expf(decay);
  u16* kept = layer.at<u16>(INPUTS) + (long long)(position % Delta::RING) * KEPT + CHANNELS + m.h;
  kept[0] = b;
  kept[Delta::VALUE_HEADS] = a;
  layer.at<float>(DECAYS)[m.slot * Delta::VALUE_HEADS + m.h] = decay;
}

// What of the state and of each earlier token's correction is left before this token: lane s has the
// block's s-th token.
__device__ __forceinline__ void sum_decays(Program& p, const Layer& layer, const Mixer& m) {
  Mixing& s = p.s->mixing;
  const int lane = p.lane;
  const float decay =
      lane < m.at ? layer.at<const float>(DECAYS)[m.place(lane) * Delta::VALUE_HEADS + m.h] : 0;
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
// convolution over the last TAPS tokens and SiLU. A lane has two neighbours.
__device__ __forceinline__ void convolve(Program& p, const Layer& layer, const Mixer& m,
                                         const u64* qkvz, u32 tag, int position) {
  constexpr int TAPS = Delta::TAPS;
  Mixing& s = p.s->mixing;
  u16* const inputs = layer.at<u16>(INPUTS);
  const u16* filter = layer.at<const u16>(FILTER);
#pragma unroll 1
  for (int n = (p.warp * 32 + p.lane) * 2; n < 2 * (KEY_DIM + VALUE_DIM); n += WARPS * 64) {
    const bool is_key = n < 2 * KEY_DIM, is_z = n >= 2 * KEY_DIM + VALUE_DIM;
    const int channel =
        is_key ? n / KEY_DIM * OF_KEYS + m.key_head * KEY_DIM + n % KEY_DIM
               : 2 * OF_KEYS + is_z * OF_VALUES + m.h * VALUE_DIM + (n - 2 * KEY_DIM) % VALUE_DIM;
    float y[2] = {0, 0}, taps[TAPS][2] = {};
    if (!is_z)
#pragma unroll
      for (int tap = 0; tap < TAPS; tap++) {
        for (int j = 0; j < 2; j++) taps[tap][j] = number(filter[(channel + j) * TAPS + tap]);
        const int t = position - (TAPS - 1 - tap);
        if (tap == TAPS - 1 || t < 0) continue;  // before token 0 all is 0
        const u32 pair = *(const u32*)(inputs + (long long)(t % Delta::RING) * KEPT + channel);
        y[0] += taps[tap][0] * low_number(pair);
        y[1] += taps[tap][1] * high_number(pair);
      }
    u32 pair[1];
    await(pair, qkvz, {channel / 2}, tag);
    const float x[2] = {low_number(pair[0]), high_number(pair[0])};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      y[j] = number(rounded(y[j] + taps[TAPS - 1][j] * x[j]));  // as PyTorch rounds it
      s.made[n + j] = is_z ? x[j] : number(rounded(y[j] / (1 + __expf(-y[j]))));
    }
    if (!is_z && (!is_key || m.stores_key))
      *(u32*)(inputs + (long long)(position % Delta::RING) * KEPT + channel) = pair[0];
  }
}

// Rows of the state before the block: zeros before the first one, whatever lies there.
__device__ __forceinline__ float state_at(const Program& p, const Mixer& m, int row, int column) {
  const float* slot = (const float*)p.slot(p.next_slot + row / SLOT_ROWS);
  return m.block ? slot[row % SLOT_ROWS * VALUE_DIM + column] : 0;
}

// The state behind the block, of which this token is the last.
__device__ __forceinline__ void put_state(Program& p, const Layer& layer, const Mixer& m) {
  const Mixing& s = p.s->mixing;
  const int thread = p.warp * 32 + p.lane, column = thread % VALUE_DIM, at = m.at;
  const float* keys = (const float*)p.slot(p.next_slot + STATE_SLOTS);
  const float* corrections = (const float*)p.slot(p.next_slot + STATE_SLOTS + 1);
  const float* own_key = s.made + KEY_DIM;
  const float own = rsqrtf(s.k_k + 1e-6f) * s.correction[column];
  float* to = layer.at<float>(STATES) + m.state(m.block + 1) + column;
  constexpr int ROWS = 16;
#pragma unroll 1
  for (int first = thread / VALUE_DIM * SPLIT_ROWS, i = 0; i < SPLIT_ROWS; i += ROWS) {
    float sums[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      sums[r] = s.from_start * state_at(p, m, first + i + r, column);
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

// x: what enters the layer, words with x_tag or, if that is 0, a plain row. qkvz: In's words -> words
// of `out`, of one value head.
__device__ __forceinline__ void mix(Program& p, const Layer& layer, int h, const u64* x, u32 x_tag,
                                    const u64* qkvz, u64* out, u32 tag, int position, float eps) {
  p.reload_ids();
  Mixing& s = p.s->mixing;
  const Mixer m(h, position);
  const int lane = p.lane, thread = p.warp * 32 + lane, at = m.at;
  const float *query = s.made, *key = query + KEY_DIM, *value = key + KEY_DIM, *z = value + VALUE_DIM;
  gates_of(p, layer, h, x, x_tag);
  if (p.warp == WARPS - 1) sum_decays(p, layer, m);
  convolve(p, layer, m, qkvz, tag, position);
  meet();

#pragma unroll 1
  for (int i = 0; i < MIXER_SLOTS; i++) {
    wait_for(p.s->held[(p.next_slot + i) % STAGES], p.next_slot + i);
    wait(&p.s->full[(p.next_slot + i) % STAGES], (p.next_slot + i) / STAGES & 1);
  }
  const float* keys = (const float*)p.slot(p.next_slot + STATE_SLOTS);
  const float* corrections = (const float*)p.slot(p.next_slot + STATE_SLOTS + 1);
  if (p.warp == WARPS - 1) finish_gates(p, layer, m, position);
  {  // what the state makes of the key and of the query
    const int column = thread % VALUE_DIM, first = thread / VALUE_DIM * SPLIT_ROWS;
    float of_key = 0, of_query = 0;
#pragma unroll 8
    for (int row = first; row < first + SPLIT_ROWS; row++) {
      const float number = state_at(p, m, row, column);
      of_key += number * key[row];
      of_query += number * query[row];
    }
    s.found[thread / VALUE_DIM][0][column] = of_key;
    s.found[thread / VALUE_DIM][1][column] = of_query;
  }
  // Products of the block's keys, the token's own at last, with the key and the query.
#pragma unroll 1
  for (int t = p.warp; t <= at; t += WARPS) {
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

  if (p.warp == 0) {  // a lane has four columns
    const int column = lane * 4;
    float of_key[4] = {}, of_query[4] = {}, y[4];
    const auto add_to = [](float(&sums)[4], float weight, const float* x) {
      const float4 four = *(const float4*)x;
      sums[0] += weight * four.x, sums[1] += weight * four.y;
      sums[2] += weight * four.z, sums[3] += weight * four.w;
    };
#pragma unroll
    for (int i = 0; i < SPLITS; i++) {
      add_to(of_key, s.from_start, &s.found[i][0][column]);
      add_to(of_query, s.from_start, &s.found[i][1][column]);
    }
#pragma unroll 4
    for (int t = 0; t < at; t++) {
      add_to(of_key, s.of_key[t], corrections + t * VALUE_DIM + column);
      add_to(of_query, s.of_query[t], corrections + t * VALUE_DIM + column);
    }
    // Key and query have unit length, and the query is times KEY_DIM ** -0.5.
    const float unit_k = rsqrtf(s.k_k + 1e-6f);
    const float unit_q = rsqrtf(s.q_q + 1e-6f) * rsqrtf((float)KEY_DIM);
    const float k_q = s.k_q * unit_k * unit_q;
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float u = s.beta * (value[column + i] - s.decayed * unit_k * of_key[i]);
      s.correction[column + i] = u;
      layer.at<float>(CORRECTIONS)[(m.slot * Delta::VALUE_HEADS + h) * VALUE_DIM + column + i] = u;
      y[i] = s.decayed * unit_q * of_query[i] + k_q * u;
      squares += y[i] * y[i];
    }
    if (m.stores_key)
#pragma unroll
      for (int e = lane; e < KEY_DIM; e += 32)
        layer.at<float>(KEYS)[(m.slot * Delta::KEY_HEADS + m.key_head) * KEY_DIM + e] =
            unit_k * key[e];
    const float one = rsqrtf(all_lanes(squares, add) / VALUE_DIM + eps);
    const auto norm = layer.at<const NumberOf<Delta::FLOAT_NORM>::Type>(VALUE_NORM);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float gate = z[column + i];
      y[i] *= one * any_number(norm[column + i]) * __fdividef(gate, 1 + __expf(-gate));
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      poke(out + Product<Wo>::word(0, h * VALUE_DIM + column + i),
           word_of(pair_of(y[i], y[i + 1]), tag));
  }
  if (at == Delta::BLOCK - 1) {
    meet();
    put_state(p, layer, m);
  }
  meet();  // all have read the slots
  if (p.warp == 0 && lane < MIXER_SLOTS)
    arrive_for(&p.s->empty[(p.next_slot + lane) % STAGES], SQUAD_WARPS);
  p.next_slot += MIXER_SLOTS;
}
#endif
