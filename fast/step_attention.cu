// Attention: which program has what of the cache, a split of it, and several splits joined.

// The last programs have fewer of the products' tiles, and so the first tasks.
__device__ __forceinline__ int first_task() { return PROGRAMS - 1 - (int)blockIdx.x; }

// Attention's tasks: each is a kv head, one or two slices of its values' columns, and one of n splits
// of the cache's positions that a token at `position` sees. A text of up to PASS positions has one
// split, and a task one slice. Of a longer one a task has WIDE slices, as it reads all of a key, and a
// split has up to PASS / WIDE positions, or more where there are no more programs or LARGEST_SPLITS.
struct Splits {
  int first, end, chunk, n, slices;
  __device__ __forceinline__ Splits(int position, int window) {
    end = position + 1;
    first = window && end > window ? end - window : 0;
    const int seen = end - first;
    n = slices = 1;
    chunk = (seen + 15) / 16 * 16;
    if (chunk <= PASS) return;
    slices = WIDE;
    const int programs = max(1, PROGRAMS / (KV_HEADS * COLUMN_SLICES / WIDE));
    n = min(min(LARGEST_SPLITS, programs), (seen + PASS / WIDE - 1) / (PASS / WIDE));
    chunk = ((seen + n - 1) / n + 15) / 16 * 16;
    n = (seen + chunk - 1) / chunk;
  }
  // Of things that come once for each slice of a task, in turns: which slice the i-th is for, and how
  // many of the first i are for one slice. There are one or two slices.
  __device__ __forceinline__ int slice_of(int i) const { return i & slices - 1; }
  __device__ __forceinline__ int per_slice(int i) const { return i >> slices - 1; }
  __device__ __forceinline__ int tasks() const {
    return KV_HEADS * per_slice(COLUMN_SLICES) * n;
  }
};
struct Task {
  int slice, kv, split, begin, end;  // slice: the first; begin, end: of the positions in the cache
  bool has_new;
  __device__ __forceinline__ Task(int nth, const Splits& of, int position) {
    const int whole = of.n > 1 ? nth / of.n : nth;
    split = nth - whole * of.n;
    slice = whole / KV_HEADS * of.slices;
    kv = whole % KV_HEADS;
    has_new = split + 1 == of.n;
    begin = of.first + split * of.chunk;
    end = min(begin + of.chunk, position);
  }
};

// A head's elements in a lane's hands: LANE_ELEMENTS neighbours. The first TURNED of them turn, each
// with that TURNED / 2 behind or before it, which another lane has.
constexpr int LANE_ELEMENTS = HEAD_DIM / 32, HALF_OF_TURNED = TURNED / 2 / LANE_ELEMENTS;  // lanes
static_assert(TURNED % (2 * LANE_ELEMENTS) == 0);
// Where Qkv has heads: queries, behind each its gate if OUTPUT_GATE is 1, keys, values, and all gates
// if it is 2.
constexpr int PER_QUERY = OUTPUT_GATE == 1 ? 2 : 1, FIRST_KEY = HEADS * PER_QUERY;
__device__ __forceinline__ int gate_of(int head) {
  return OUTPUT_GATE == 1 ? 2 * head + 1 : FIRST_KEY + 2 * KV_HEADS + head;
}
// What attention gives of a head, elements e and e + 1, is multiplied by the sigmoids of its gate. All
// lanes of a warp call this together, those that are not `mine` for nothing.
__device__ __forceinline__ void gate_pair(float& low, float& high, const u64* qkv, int head, int e,
                                          bool mine, u32 tag) {
  if (!OUTPUT_GATE) return;
  const int at[1] = {mine ? (gate_of(head) * HEAD_DIM + e) / 2 : -1};
  u32 pair[1];
  await(pair, qkv, at, tag);
  low /= 1 + exp2f(-low_number(pair[0]) * LOG2_E);
  high /= 1 + exp2f(-high_number(pair[0]) * LOG2_E);
}
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
// RMSNorm and the rotation of a query or key, whose factors are loaded before it is there: where
// nothing turns, 1 and 0.
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
      const bool first = lane < HALF_OF_TURNED;
      const int partner = first ? lane + HALF_OF_TURNED : lane - HALF_OF_TURNED;
      const float other = __shfl_sync(~0u, x[i], partner);
      x[i] = x[i] * cos[i] + (first ? -other : other) * sin[i];
    }
  }
};
__device__ __forceinline__ void put_head(u16* to, const float (&x)[LANE_ELEMENTS], int lane) {
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; i += 2)
    ((u32*)to)[(lane * LANE_ELEMENTS + i) / 2] = pair_of(x[i], x[i + 1]);
}

// A key or value as model.to_int8() has it: each lane writes the codes of its elements -> the scale.
// Elements are rounded first, as they are where the model writes them.
__device__ __forceinline__ float put_codes(unsigned char* to, const float (&x)[LANE_ELEMENTS],
                                           int lane) {
  float y[LANE_ELEMENTS];
  u32 most = 0;  // the bits of the largest size; those of a NaN are larger
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; i++) {
    y[i] = number(rounded(x[i]));
    most = max(most, __float_as_uint(y[i]) & 0x7fffffff);
  }
  const float scale = __uint_as_float(__reduce_max_sync(~0u, most)) / 127;
  const float no_zero = fmaxf(scale, 1e-30f);
#pragma unroll
  for (int i = 0; i < LANE_ELEMENTS; i++)
    to[lane * LANE_ELEMENTS + i] = (unsigned char)__float2int_rn(y[i] / no_zero);
  return scale;
}

// Attention of a kv head's queries over one split: words of `out`, or, of several splits,
// `split_sums`: [HEADS, LARGEST_SPLITS, HEAD_DIM + 2] of fp32 sums, largest score and total. Each warp
// has every WARPS-th 16 positions and one slice of the values or, where a task has two, every second
// warp has one slice, and these share the positions. As in arXiv 2307.08691 each has its own largest
// score; in the end they are joined.
__device__ __forceinline__ void attend(Program& p, const Layer& layer, int nth, const Splits& of,
                                       const u64* qkv, u64* split_sums, u64* out, u32 tag,
                                       int position, float eps, float scale) {
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
    const int head = is_query ? (kv * QUERIES + i) * PER_QUERY
                              : FIRST_KEY + (is_key ? 0 : KV_HEADS) + kv;
    await_head(x, qkv, head, tag, lane);
    if (is_query || is_key) turn(x, eps, lane);
    u16* const here = is_query ? s.q[i] : is_key ? s.k : s.v;
    if (INT8_CACHE && !is_query)
      s.new_scales[!is_key] = put_codes((unsigned char*)here, x, lane);
    else
      put_head(here, x, lane);
    if (!is_query && task.slice == 0) {
      const int length = (int)(layer.fields[LENGTH_AND_WINDOW] >> 32);  // positions of the cache
      const long long slot = (long long)kv * length + position;
      const int cache = is_key ? K_CACHE : V_CACHE;
      if (INT8_CACHE)
        layer.at<float>(is_key ? K_SCALES : V_SCALES)[slot] =
            put_codes(layer.at<unsigned char>(cache) + slot * HEAD_DIM, x, lane);
      else
        put_head(layer.at<u16>(cache) + slot * HEAD_DIM, x, lane);
    }
  }
  meet();
  if (warp == 0) s.streaming = 1;

  // A tile is 16 positions here. The new token's is read from shared memory, as a tile of which 15
  // are masked.
  const int cached = (task.end - task.begin + 15) / 16, all_tiles = cached + task.has_new;
  const int nth_slice = of.slice_of(warp), first_tile = of.per_slice(warp);
  float largest[2] = {-1e30f, -1e30f}, total[2] = {0, 0}, acc[4][4] = {};  // of queries 2 t + j
#pragma unroll 1
  for (int tile = first_tile; tile < all_tiles; tile += of.per_slice(WARPS)) {
    const int last = tile == cached ? 0 : task.end - task.begin - tile * 16 - 1;  // that is seen
    const bool is_new = tile == cached;
    const int at = p.next_slot + tile / SLOT_TILES;
    if (!is_new) {
      // A warp takes few of these slots, and may come before the one that had this place is there:
      // a barrier's parity alone would let it through.
      wait_for(s.held[at % STAGES], at);
      wait(&s.full[at % STAGES], at / STAGES & 1);
    }
    // Row n of the left operand is position far_apart(n) of the tile's 16, where lane 4 g + t has
    // rows g and g + 8. Behind the last position the last is read again, and masked below.
    const unsigned char* box = p.slot(at);
    const unsigned char* keys = is_new ? (const unsigned char*)s.k : box;
    const int bytes = is_new ? 128 : CACHE_ROWS * 128;  // between 128 bytes of a row and the next
    const int row = is_new ? 0 : tile % SLOT_TILES * 16;
    const int rows[2] = {row + min(far_apart(g), last), row + min(far_apart(g) + 8, last)};
    float c[4] = {}, d[4] = {};  // of query 2 t + i % 2 and row g + i / 2 * 8
    const u16* query = s.q[min(g, QUERIES - 1)];
#pragma unroll
    for (int i = 0; i < LANE_ELEMENTS; i++) {
      // Both operands have their elements in the same other order, which a sum does not see.
      const uint4 q = *(const uint4*)(query + 32 * i + 8 * t);
      const unsigned char* of_keys = keys + i / (INT8_CACHE ? 4 : 2) * bytes;
      const uint4 k0 = eight_of(of_keys, rows[0], i * 4 + t);
      const uint4 k1 = eight_of(of_keys, rows[1], i * 4 + t);
      mma(c, {k0.x, k1.x, k0.y, k1.y}, q.x, q.y);
      mma(d, {k0.z, k1.z, k0.w, k1.w}, q.z, q.w);
    }
    // Columns 8 g to 8 g + 7 of the values of rows 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. An int8 box
    // has two slices.
    const int slice = task.slice + nth_slice;
    const unsigned char* values =
        is_new ? (const unsigned char*)s.v + slice / (INT8_CACHE ? 2 : 1) * 128
               : box + KEY_BYTES + (INT8_CACHE ? 0 : nth_slice * VALUE_BYTES);
    const int nth_eight = INT8_CACHE ? (slice & 1) * 8 + g : g;
    uint4 value[4];
#pragma unroll
    for (int j = 0; j < 4; j++)
      value[j] = eight_of(values, row + min(j / 2 * 8 + far_apart(2 * t + j % 2), last), nth_eight);
    // A scale belongs to a position, so it multiplies that position's score or share.
    float k_scale[2] = {1, 1}, v_scale[2] = {1, 1};  // of rows[0] and rows[1]
    if (INT8_CACHE) {
      // All slots of a task begin at the same remainder of 4, as CACHE_ROWS is a multiple of it.
      const float* of_slot = (const float*)(box + KEY_BYTES + VALUE_BYTES) + task.begin % 4;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        k_scale[j] = is_new ? s.new_scales[0] : of_slot[rows[j]];
        v_scale[j] = is_new ? s.new_scales[1] : of_slot[SLOT_SCALES + rows[j]];
      }
    }
    if (!is_new) {
      __syncwarp();
      // A slot has SLOT_TILES tiles, and wants SQUAD_WARPS arrivals. The warps of the text's last
      // tile arrive for those, too, that the text does not have.
      const int arrivals = of.per_slice(SQUAD_WARPS / SLOT_TILES);
      const int more = tile + 1 == cached ? SLOT_TILES - 1 - tile % SLOT_TILES : 0;
      if (lane == 0) arrive_for(&s.empty[at % STAGES], arrivals * (1 + more));
    }
    float most[2] = {largest[0], largest[1]};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float score = (c[i] + d[i]) * (scale * LOG2_E) * k_scale[i / 2];
      c[i] = far_apart(g) + i / 2 * 8 <= last ? score : -1e30f;
      most[i % 2] = fmaxf(most[i % 2], c[i]);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
#pragma unroll
      for (int o = 4; o < 32; o *= 2) most[j] = fmaxf(most[j], __shfl_xor_sync(~0u, most[j], o));
      if (tile != first_tile) {  // a short text has no more than the first
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
    // The shares, times the values' scales, as the right operand: pairs of rows of query g.
    const u32 b0 = transposed(pair_of(c[0] * v_scale[0], c[1] * v_scale[0]));
    const u32 b1 = transposed(pair_of(c[2] * v_scale[1], c[3] * v_scale[1]));
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
  const int busy = min(WARPS, all_tiles * of.slices);  // warps
  // A warp has 32 columns of a head: lane 8 a + b columns 4 b to 4 b + 3 of every fourth warp's
  // sums.
#pragma unroll 1
  for (int i = warp; i < QUERIES * of.slices * (COLUMNS / 32); i += WARPS) {
    const int first = i % (COLUMNS / 32) * 32, of_head = i / (COLUMNS / 32);
    const int h = of.per_slice(of_head), head = kv * QUERIES + h;
    const int nth_slice = of.slice_of(of_head), slice = task.slice + nth_slice;
    const int quarter = lane >> 3, column = first + (lane & 7) * 4;
    // Lane j has what the j-th warp with this slice found.
    const int of_lane = lane % WARPS * of.slices + nth_slice;
    const float of_warp = of_lane < busy ? s.largest[h][of_lane] : -1e30f;
    const float sink = SINKS && of.n == 1 ? number(sinks[head]) * LOG2_E : -1e30f;
    const float most = fmaxf(all_lanes<WARPS>(of_warp, larger), sink);
    const float share = of_lane < busy ? exp2f(of_warp - most) : 0;
    float all = all_lanes<WARPS>(of_lane < busy ? share * s.total[h][of_lane] : 0.0f, add);
    if (SINKS && of.n == 1) all += exp2f(sink - most);
    float y[4] = {};
#pragma unroll
    for (int from = 0; from < WARPS; from += 4) {
      const int j = from + quarter, w = j * of.slices + nth_slice;
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
      const float one = __fdividef(1, all);
      float low = (quarter ? y[2] : y[0]) * one, high = (quarter ? y[3] : y[1]) * one;
      const int e = slice * COLUMNS + column + 2 * quarter;
      gate_pair(low, high, qkv, head, e, quarter < 2, tag);
      if (quarter < 2)
        poke(out + Product<Wo>::word(0, head * HEAD_DIM + e), word_of(pair_of(low, high), tag));
    } else {
      u64* to = split_sums + (head * LARGEST_SPLITS + task.split) * (HEAD_DIM + 2);
      const float mine = quarter < 2 ? (quarter ? y[1] : y[0]) : quarter == 2 ? y[2] : y[3];
      poke(to + slice * COLUMNS + column + quarter, word_of(__float_as_uint(mine), tag));
      // All slices of a head have the same scores, and so the same totals.
      if (slice == 0 && first == 0 && lane < 2)
        poke(to + HEAD_DIM + lane, word_of(__float_as_uint(lane ? all : most), tag));
    }
  }
}

// Several splits' sums -> words of `out`. A program has 32 elements of a head; a warp of it has every
// WARPS-th split, and the first warp joins what the others have.
__device__ __forceinline__ void combine(Program& p, const Layer& layer, int n, const u64* qkv,
                                        const u64* split_sums, u64* out, u32 tag) {
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
      await(found, split_sums + head * LARGEST_SPLITS * (HEAD_DIM + 2), at, tag);
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
      const float of_warp = lane < busy ? s.largest[0][lane] : -1e30f;
      const float sink = SINKS ? number(sinks[head]) * LOG2_E : -1e30f;
      const float most = fmaxf(all_lanes(of_warp, larger), sink);
      const float share = lane < busy ? exp2f(of_warp - most) : 0;
      float total = all_lanes(lane < busy ? share * s.total[0][lane] : 0.0f, add), y = 0;
      if (SINKS) total += exp2f(sink - most);
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float weight = __shfl_sync(~0u, share, w);
        if (w < busy) y += weight * s.attended[w][0][lane];
      }
      y /= total;
      float next = __shfl_down_sync(~0u, y, 1);
      gate_pair(y, next, qkv, head, e, !(lane & 1), tag);
      if (!(lane & 1))
        poke(out + Product<Wo>::word(0, head * HEAD_DIM + e), word_of(pair_of(y, next), tag));
    }
  }
}
