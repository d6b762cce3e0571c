// A product of one row: its inputs become digits, tiles come from the ring, sums become words.

// Words in the order of their numbers, as attention reads them.
struct InOrder {
  static __device__ __forceinline__ int word(int, int k) { return k / 2; }
};

template <class O>
struct Product : Sizes<O> {
  typedef Sizes<O> S;
  typedef typename NumberOf<O::FLOAT_NORM>::Type Norm;
  // ENTERS: the layer's first product, Qkv or In. MEASURES: of a mixture each program that chooses
  // experts reads what enters the layer, too, as its size is the unit of the router's sums.
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
    return in_row(unit) * S::UNIT_INPUTS + (S::PLAIN ? n / 2 * 64 + lane * 2 + (n & 1)
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
    constexpr int PER_LOAD = S::PLAIN ? 1 : 2;
    bool there = true;
#pragma unroll
    for (int i = 0; i < INPUTS / 2; i += PER_LOAD) {
      u64 some[2];
      if (S::PLAIN) some[0] = peek(words + i * 32 + lane);
      else peek_two(words + i * 32 + lane * 2, some);
#pragma unroll
      for (int j = 0; j < PER_LOAD; j++) {
        const bool wanted = O::K % S::UNIT_INPUTS == 0 || input(unit, lane, 2 * (i + j)) < O::K;
        pairs[i + j] = wanted ? (u32)some[j] : 0;
        there &= (u32)(some[j] >> 32) == tag || !wanted;
      }
    }
    return there;
  }

  // A lane's weights of a norm, of N units: first, first + BY and so on.
  template <int N, int BY = WARPS>
  static __device__ __forceinline__ void load_gains(float (&gain)[N][INPUTS], const Norm* norm,
                                                    int first, int lane) {
#pragma unroll
    for (int i = 0; i < N * INPUTS; i++) {
      const int k = input(first + i / INPUTS * BY, lane, i % INPUTS);
      gain[i / INPUTS][i % INPUTS] = O::NORM && k < O::K ? any_number(norm[k]) : 0;
    }
  }
  // Waits for a lane's pairs of these units of x: words with this tag or, if it is 0, a plain row.
  template <int N, int BY = WARPS>
  static __device__ __forceinline__ void await_units(u32 (&pairs)[N][INPUTS / 2], const u64* x,
                                                     u32 tag, int first, int lane) {
    const auto unit = [&](int n) { return min(first + n * BY, S::UNITS - 1); };
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
      give_up_after(tries);
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

  // Where norms stand after branches: x is what a branch makes, and the stream that enters this
  // product is the one before, which each program has, plus the norm of x. -> its pairs, of all
  // units of the warp. Of a plain row: the stream. row_out, if it is there: where the stream goes.
  static __device__ __forceinline__ void add_branch(Program& p, u32 (&pairs)[ROUNDS][INPUTS / 2],
                                                    const u64* x, u32 tag, const Norm* post_norm,
                                                    u16* row_out = nullptr) {
    Shared& s = *p.s;
    const int lane = p.lane;
    float gain[ROUNDS][INPUTS];
    if (!ENTERS || tag) load_gains(gain, post_norm, p.warp, lane);
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
  static __device__ __forceinline__ void prepare_with_post_norm(Program& p, const u64* x, u32 tag,
                                                        const Norm* norm, const Norm* post_norm) {
    u32 pairs[ROUNDS][INPUTS / 2];
    add_branch(p, pairs, x, tag, post_norm);
    float gain[ROUNDS][INPUTS];
    load_gains(gain, norm, p.warp, p.lane);
#pragma unroll
    for (int n = 0; n < ROUNDS; n++)
      if (p.warp + n * WARPS < S::UNITS) put(p, p.warp + n * WARPS, pairs[n], gain[n]);
  }

  // A unit becomes digits or, for weights of 16 bits or e4m3, terms.
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
    // All |v| are below 2^(exponent - 126). Infinity and NaN have neither terms nor digits: 200
    // stands for any exponent where 255 makes the result NaN.
    const u32 exponent = __reduce_max_sync(~0u, most) >> 23;
    const u32 finite = exponent < 255 ? exponent : 200;
    // What 1 of a unit's scaled inputs stands for, 1 / scale: 2^(exponent - shift - 127).
    const auto worth = [&](int shift) {
      return __uint_as_float(exponent == 255 ? 0x7fc00000 : (exponent - shift) << 23);
    };
    if constexpr (S::PLAIN) {
      // Numbers of 16 bits, whose sum is v * scale, and below 8, so that fp16 has room for the last.
      const float scale = __uint_as_float((256 - finite) << 23);
#pragma unroll
      for (int i = 0; i < INPUTS; i += 2) {
        float low = v[i] * scale, high = v[i + 1] * scale;
#pragma unroll
        for (int term = 0; term < S::TERMS; term++) {
          const u32 pair = pair_of(low, high);
          digits_of(s, unit)[(i / 2 * S::TERMS + term) * 32 + lane] = pair;
          low -= low_number(pair);
          high -= high_number(pair);
        }
      }
      if (lane == 0) s.scale[unit] = worth(2);
    } else if constexpr (O::E4M3) {
      const float scale = __uint_as_float((127 + 140 - finite) << 23);
      put_fp16_terms<DIGIT_WORDS, SETS, S::TERMS>(digits_of(s, unit), v, scale, lane);
      if (lane == 0) s.scale[unit] = worth(13);
    } else {
      // |v * scale| is below 2^26, as the scale is 2^(152 - exponent).
      const float scale = __uint_as_float((127 + 152 - finite) << 23);
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
      // 1 / scale, and what else a product is too large by: int4's codes 16, e2m1's 2.
      const float one = worth(O::E2M1 ? 26 : O::BITS == 4 ? 29 : 25);
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
      chunk = begin * S::UNIT_CHUNKS + (begin > 0 ? S::MORE_CHUNKS : 0);
    }
  };
  static __device__ __forceinline__ int nth_of(int tile, int unit) {
    return S::SUMMED ? unit / S::ROW_UNITS : O::EXPERTS ? tile / S::TILES : 0;
  }

  static __device__ __forceinline__ void group_of(const void* scales, long long i, float& scale,
                                                  float& zero) {
    zero = O::E4M3 ? 0 : O::E2M1 ? 16 : 1 << (O::BITS - 1);
    ::group_of<S::BYTE_SCALES, O::FLOAT_SCALES>(scales, i, scale, zero);
  }

  typedef typename SumOf<O::E4M3, DIGIT_WORDS, O::E2M1>::Type Sum;
  typedef typename Sum::Type Column[4];  // of a sum: of rows lane / 4 and lane / 4 + 8 two columns
  // What two columns make, of row i * 8.
  static __device__ __forceinline__ float value_of(const Column& c, const Column& d, int i) {
    return Sum::value(c[2 * i] + d[2 * i], c[2 * i + 1] + d[2 * i + 1]);
  }

  // What a lane needs of x and of the slot's order for a unit; if ONE_UNIT, of all tiles.
  struct Unit {
    Operands o;
    RowPart row_part;
    int unit, wl, lane;
    float sums[SETS], scale;
    __device__ __forceinline__ Unit(Shared& s, int nth_slot, int wl, int lane)
        : o(operands(s, nth_slot * SQUAD_WARPS + wl, lane)), row_part(nth_slot, wl),
          unit(nth_slot * SQUAD_WARPS + wl), wl(wl), lane(lane) {
#pragma unroll
      for (int i = 0; i < SETS; i++) sums[i] = S::DIGITS ? s.sums[unit][i][lane & 3] : 0;
      scale = S::DIGITS && lane & 1 ? s.scale[unit] * 65536 : s.scale[unit];
    }
    // Of rows lane / 4 and lane / 4 + 8, what this lane's column gives.
    __device__ __forceinline__ void multiply(const unsigned char* slot, float& y0,
                                             float& y1) const {
      const int row = lane >> 2, half = lane >> 1 & 1, unit_block = 2 * in_row(unit);
      const uint4* from = (const uint4*)(slot + wl * 2048) + lane;
      const uint4 p[2][2] = {{from[0], from[32]}, {from[64], from[96]}};  // [block][row or row + 8]
      Column c = {0, 0, 0, 0}, d = {0, 0, 0, 0};
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const uint4 low = p[m >> 1][0], high = p[m >> 1][1];
        const u32 a[4] = {m & 1 ? low.z : low.x, m & 1 ? high.z : high.x, m & 1 ? low.w : low.y,
                          m & 1 ? high.w : high.y};
        Sum::add(c, d, a, o.b[m]);
        if (S::GROUPED && (m + 1) % (4 / SETS) == 0) {
          const int set = m / (4 / SETS);
          const int block = unit_block + (SETS == 1 ? half : SETS == 2 ? set : set >> 1);
          const int part = SETS == 1 ? 0 : SETS == 2 ? half : (set & 1) * 2 + half;
          if (block < S::BLOCKS) {
            const int chunk = row_part.chunk + block / S::PER_CHUNK -
                              row_part.first_block / S::PER_CHUNK;
#pragma unroll
            for (int i = 0; i < 2; i++) {
              float scale, zero;
              const int nth = O::SHARED_ROWS ? i : (row + 8 * i) * O::PARTS + part;
              group_of(slot + S::CODE_BYTES, chunk * S::CHUNK_SCALES + nth, scale, zero);
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
  // 64 inputs of 16 rows or, of EIGHT_ROWS, 128 of 8. mma() has 16 rows and 8 columns:
  //
  //     columns 0 to 3     terms of inputs 0 to 63, for rows 0 to 15 or, of EIGHT_ROWS, rows 0 to 7
  //     columns 4 to 7     0 or, of EIGHT_ROWS, terms of inputs 64 to 127, for rows 8 to 15, which
  //                        hold these inputs of the same eight rows
  //
  // What the other rows make of a column is not used.
  struct PlainUnit {
    uint4 x[2];  // of each 32 inputs eight, 8 t to 8 t + 7 in lane 4 g + t, of column g
    float scale;
    int unit, wl, lane;
    __device__ __forceinline__ PlainUnit(const Shared& s, int nth_slot, int wl, int lane)
        : unit(nth_slot * SQUAD_WARPS + wl), wl(wl), lane(lane) {
      const int column = lane >> 2, half = O::EIGHT_ROWS ? column >> 2 : 0, nth = column - 4 * half;
      const int term = half * S::TERMS + min(nth, S::TERMS - 1);
      const uint4* from = (const uint4*)s.inputs + (unit * DIGIT_WORDS + term) * 8 + (lane & 3);
#pragma unroll
      for (int i = 0; i < 2; i++) x[i] = nth < S::TERMS ? from[i * 4] : uint4{0, 0, 0, 0};
      scale = s.scale[unit];
    }
    __device__ __forceinline__ void multiply(const unsigned char* slot, float& y0,
                                             float& y1) const {
      const unsigned char* box = slot + wl * 2048;
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
      if (O::EIGHT_ROWS) {
        y0 = lane & 2 ? y1 : y0;
        y1 = 0;
      }
    }
  };
  // Which of a tile's first eight rows a lane has.
  static __device__ __forceinline__ int row_of(int lane) {
    return S::PLAIN ? far_apart(lane >> 2) : lane >> 2;
  }
  template <bool, class A, class B> struct Either { typedef A Type; };
  template <class A, class B> struct Either<false, A, B> { typedef B Type; };

  // ABREAST squads, a team, take as many slots of a tile at once, and then the next ones. Teams have
  // tiles of their own.
  static constexpr int ABREAST = S::TILE_SLOTS < SQUADS ? S::TILE_SLOTS : SQUADS;
  static constexpr int TEAMS = SQUADS / ABREAST;
  static constexpr int ENTRIES = ABREAST * SQUAD_WARPS;  // sums of a tile and a row in partial
  // A warp has one unit of a tile, the same of all, whose part of x stays in its registers.
  static constexpr bool ONE_UNIT = S::TILE_SLOTS == ABREAST;
  // Tiles whose instructions need not wait for each other, where a team has many.
  static constexpr int AT_ONCE = ONE_UNIT && TilesHere<O>::value >= 4 * TEAMS ? 2 : 1;

  // Multiplies this warp's units of its team's tiles. Of each tile their sum is one entry of partial.
  static __device__ __forceinline__ void multiply_tiles(const Program& p, int my_tiles) {
    Shared& s = *p.s;
    const int squad = p.warp / SQUAD_WARPS, wl = p.warp % SQUAD_WARPS, column = p.lane & 3;
    const int team = squad / ABREAST, first = squad % ABREAST;
    if (team >= TEAMS) return;
    typedef typename Either<S::PLAIN, PlainUnit, Unit>::Type MyUnit;
    const auto is_there = [&](int n) { return n * SQUAD_WARPS + wl < S::UNITS; };
    const auto unit_of = [&](int n) {
      return MyUnit(s, is_there(n) ? n : 0, is_there(n) ? wl : 0, p.lane);
    };
    MyUnit u = unit_of(first);  // used if ONE_UNIT
#pragma unroll 1
    for (int t = team; t < my_tiles; t += AT_ONCE * TEAMS) {
      float y[AT_ONCE][2] = {};
      int n = first;
#pragma unroll 1
      do {
        if (!ONE_UNIT) u = unit_of(n);
        int slots[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
          const int tile = t + i * TEAMS < my_tiles ? t + i * TEAMS : t;  // after the last, it again
          slots[i] = p.next_slot + tile * S::TILE_SLOTS + n;
          wait(&s.full[slots[i] % STAGES], slots[i] / STAGES & 1);
        }
        if (is_there(n))
#pragma unroll
          for (int i = 0; i < AT_ONCE; i++) {
            float y0 = 0, y1 = 0;
            u.multiply(p.slot(slots[i]), y0, y1);
            y[i][0] += y0;
            y[i][1] += y1;
          }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
          if (p.lane == 0 && t + i * TEAMS < my_tiles) arrive(&s.empty[slots[i] % STAGES]);
      } while (!ONE_UNIT && (n += ABREAST) < S::TILE_SLOTS);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        // The four lanes of a row: the odd ones take row + 8.
        float mine = column & 1 ? y[i][1] : y[i][0], other = column & 1 ? y[i][0] : y[i][1];
        mine += __shfl_xor_sync(~0u, other, 1);
        mine += __shfl_xor_sync(~0u, mine, 2);
        if (column < 2 && t + i * TEAMS < my_tiles)
          s.partial[t + i * TEAMS][first * SQUAD_WARPS + wl][row_of(p.lane) + 8 * column] = mine;
      }
    }
  }

  // The sums of the t-th tile -> words, and `row_out`, if it is there, as a plain row. Lanes 0 to 15
  // have its 16 rows (of EIGHT_ROWS 8, and zeros), and lanes 16 to 31 have them again, for half of the
  // warps' sums each. If ROW_PARALLEL, other ranks' sums are added.
  template <class To>
  static __device__ __forceinline__ void finish(const Program& p, int t, const Layer& layer,
                                                int field, u64* out, u32 tag, u16* row_out) {
    Shared& s = *p.s;
    const int lane = p.lane, r = lane & 15, mine = blockIdx.x + t * PROGRAMS;
    const int nth = nth_of(mine, 0), tile = O::EXPERTS && O::GATED ? mine % S::TILES : mine;
    const int n = tile * S::TILE_OUTPUTS + r % S::TILE_OUTPUTS;  // of the outputs
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
      y = (S::DIGITS ? y - zero * s.all_offsets : y) * scale;
    }
    if (O::NORM) y *= s.factor;
    if (O::BIAS) {
      const u16* bias = layer.at<const u16>(field + BIASES);
      if (there)
        for (int i = S::SUMMED ? 0 : nth; i < (S::SUMMED ? O::EXPERTS : nth + 1); i++)
          y += number(bias[(O::EXPERTS ? s.experts[i] : 0) * (O::GATED ? 2 : 1) * O::N + row]) *
               (S::SUMMED ? s.weights[i] : 1);
    }
    if constexpr (O::ROW_PARALLEL)
      y = field == DOWN * PER_PRODUCT ? sum_of_ranks<true>(p, n, y, tag)
                                      : sum_of_ranks<false>(p, n, y, tag);
    if (O::RESIDUAL) {
      y = number(rounded(y + s.residual[t][r]));
      __syncwarp();
      if (lane < 16) s.residual[t][r] = y;
    }
    if (O::GATED) {
      y = gated<O::GATED>(y, __shfl_down_sync(~0u, y, 8), p.limit, p.alpha);
      if (O::EXPERTS) y *= s.weights[nth];
    }
    const float low = __shfl_sync(~0u, y, lane * 2 & 31);
    const float high = __shfl_sync(~0u, y, lane * 2 + 1 & 31);
    const int pair = tile * (S::TILE_OUTPUTS / 2) + lane;
    if (lane < S::TILE_OUTPUTS / 2 && 2 * pair < O::N) {
      poke(out + To::word(nth, 2 * pair), word_of(pair_of(low, high), tag));
      if (O::RESIDUAL && row_out) ((u32*)row_out)[pair] = pair_of(low, high);
    }
  }

  // x: words with this tag, or a plain row if x_tag is 0. To: the product that reads what comes
  // out, whose word() says where it goes. post_norm: if POST_NORMS, the weight of the norm of x.
  template <class To>
  static __device__ __forceinline__ void run(Program& p, const Layer& layer, int which,
                                             const u64* x, u32 x_tag, u64* out, u32 tag,
                                             u16* row_out = nullptr,
                                             const Norm* post_norm = nullptr) {
    const int my_tiles = share_of(S::ALL), field = which * PER_PRODUCT;
    constexpr bool ADDS = POST_NORMS && O::NORM;
    // Who chooses no experts does not ask how large the stream is: nobody would wait for it.
    if (!my_tiles && !(ADDS && KEEPS_STREAM) && !(MEASURES && CHOOSES)) return;
    p.reload_ids();
    const Norm* norm = O::NORM ? layer.at<const Norm>(field + NORM_WEIGHT) : nullptr;
    if constexpr (ADDS) {
      prepare_with_post_norm(p, x, x_tag, norm, post_norm);
    } else {
#pragma unroll 1
      for (int first = p.warp; first < S::UNITS; first += PREPARED * WARPS)
        prepare(p, first, x, x_tag, norm);
    }
    meet();
    // Now, while the first slots come: after the products all would wait for it.
    if (p.warp == 0) {
      Shared& s = *p.s;
      s.streaming = 1;
      if (!S::GROUPED && S::DIGITS) {
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
    multiply_tiles(p, my_tiles);
    p.next_slot += my_tiles * S::TILE_SLOTS;
    meet();
    if (p.warp == 0) p.s->streaming = 0;
#pragma unroll 1
    for (int t = p.warp; t < my_tiles; t += WARPS)
      finish<To>(p, t, layer, field, out, tag, row_out);
  }
};
