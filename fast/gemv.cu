// The product of one row of x with packed or 16-bit weights, from a ring in shared memory and with
// exact integer sums. packed_gemv.py has the words, and the macros that this is compiled with:
// BITS, E4M3, E2M1, BF16, K, GROUP (0: one a row), PARTS, SHARED_ROWS, FLOAT_SCALES, GATED, NORM,
// FLOAT_NORM, BIAS, RESIDUAL, PERM, EXPERTS, WIDTH, TEAMS, STAGES. With FEW few.cu stands behind
// this, which shares the first part.
#if FLOAT_NORM
typedef float Norm;  // a weight of the norm
#else
typedef u16 Norm;
#endif

// Inputs of a block, 1 KiB of 16 rows.
constexpr int BLOCK = 512 / BITS, BLOCKS = (K + BLOCK - 1) / BLOCK;
constexpr bool GROUPED = GROUP > 0;
constexpr int PER_CHUNK = GROUP > BLOCK ? GROUP / BLOCK : 1;  // blocks that share their groups
constexpr int CHUNKS = GROUPED ? (BLOCKS + PER_CHUNK - 1) / PER_CHUNK : 1;
constexpr bool BYTE_SCALES = E2M1 && !FLOAT_SCALES;
constexpr int CHUNK_BYTES = (BYTE_SCALES ? 16 : 64) * PARTS;
constexpr bool PLAIN = BITS == 16;  // w [N, K] as PyTorch has it

#ifndef CUDA_ON_CPU

// feed() copies codes and scales into a slot, whose barrier tells when they are there.
#if __CUDA_ARCH__ >= 900
constexpr int FEEDERS = PLAIN ? 16 : 1;  // threads that copy, each a row if there are 16
__device__ __forceinline__ void feed(void* slot, const void* codes, int bytes, void* slot_scales,
                                     const void* scales, int scale_bytes, u64* b, int lane) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared.b64 [%0], %1;" ::"r"(address(b)),
               "r"(bytes + scale_bytes)
               : "memory");
  copy(slot, codes, bytes, b);
  if (scale_bytes) copy(slot_scales, scales, scale_bytes, b);
}
__device__ __forceinline__ void fed(u64* b) { arrive(b); }
#else
constexpr int FEEDERS = 32;
__device__ __forceinline__ void copy(void* to, const void* from, int bytes, int lane) {
  for (int at = lane * 16; at < bytes; at += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to) + at),
                 "l"((const char*)from + at)
                 : "memory");
}
__device__ __forceinline__ void feed(void* slot, const void* codes, int bytes, void* slot_scales,
                                     const void* scales, int scale_bytes, u64* b, int lane) {
  copy(slot, codes, bytes, lane);
  copy(slot_scales, scales, scale_bytes, lane);
}
__device__ __forceinline__ void fed(u64* b) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(b)) : "memory");
}
#endif
__device__ __forceinline__ void meet(int team) {
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(WIDTH * 32) : "memory");
}

#endif

__device__ __forceinline__ float norm_number(u16 bits) { return number(bits); }
__device__ __forceinline__ float norm_number(float weight) { return weight; }

struct Place {  // in a ring
  int slot = 0, parity = 0;
  __device__ void next() {
    if (++slot == STAGES) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Scale and zero point, the i-th of scales_and_zeros here.
__device__ __forceinline__ void group_of(const void* here, long long i, float& scale, float& zero) {
  zero = E4M3 ? 0 : E2M1 ? 16 : 1 << (BITS - 1);
  group_of<BYTE_SCALES, FLOAT_SCALES>(here, i, scale, zero);
}

#ifndef FEW

// A warp's two blocks: inputs; of a row of w.
constexpr int UNIT = 2 * BLOCK, ROW_UNITS = (BLOCKS + 1) / 2;
constexpr bool STAGED = GROUPED && !SHARED_ROWS;  // scales come through the ring
constexpr int UNIT_CHUNKS = PER_CHUNK > 1 ? 1 : 2;
constexpr int STAGE_CHUNKS = STAGED ? WIDTH * UNIT_CHUNKS + (PER_CHUNK > 1) : 0;
constexpr int ROW_BYTES = WIDTH * 128 + 64;  // of a slot, if PLAIN: 64 for the banks' sake
constexpr int CODES = PLAIN ? 16 * ROW_BYTES : WIDTH * 2048,
              STAGE = CODES + STAGE_CHUNKS * CHUNK_BYTES;
constexpr int WARPS = WIDTH * TEAMS;
constexpr bool SUMMED = EXPERTS && !GATED;  // experts, each with an x of its own
constexpr int UNITS = ROW_UNITS * (SUMMED ? EXPERTS : 1), STEPS = (UNITS + WIDTH - 1) / WIDTH;
constexpr int WORDS = BITS == 4 || E4M3 ? 8 : 4;  // of x, that a lane has of a unit
constexpr int SETS = PLAIN ? 1 : PARTS;  // pairs of groups in a unit, whose sums are apart

// Of WIDTH warps, which multiply tile after tile of 16 rows, and the warp that feeds them.
struct Team {
  alignas(128) unsigned char ring[STAGES][STAGE];
  union {
    u32 digits[PLAIN ? 1 : UNITS][32][WORDS];
    float x[PLAIN ? UNITS : 1][UNIT];
  };
  float sums[PLAIN ? 1 : UNITS][SETS][4];  // of x, as the digits' columns have them
  float partial[WIDTH][WIDTH][16];  // a warp's sums of so many tiles
  float squares[WIDTH], offsets[WIDTH];
  u64 full[STAGES], empty[STAGES];
  int experts[EXPERTS + 1];
  volatile int busy;
};

__device__ __forceinline__ int in_row(int unit) { return SUMMED ? unit % ROW_UNITS : unit; }

// A lane's numbers of this warp's units: of a quarter of a block, those in its column of the
// product. T: u16, or float for a norm's weights.
template <typename T>
struct Inputs {
  static constexpr int N = PLAIN ? 2 : BITS == 4 ? 8 : 4;
  struct alignas(2 * sizeof(T)) Pair {
    T first, second;
  };
  T of[STEPS][N];
  // there: whether there is an x. One that is read before the kernel before has ended would stay in
  // the cache as it was.
  __device__ __forceinline__ Inputs(bool there, const T* x, const long long* perm, int wl,
                                    int lane) {
    if (!there) return;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const int unit = s * WIDTH + wl;
        const int k = in_row(unit) * UNIT +
                      (PLAIN ? lane * 2 : (lane >> 2) * (BLOCK / 4) + i * 4 + (lane & 3) * 2);
        Pair both{0, 0};
        if (PERM || K % 2) {
          if (k < K) both.first = x[PERM ? perm[k] : k];
          if (k + 1 < K) both.second = x[PERM ? perm[k + 1] : k + 1];
        } else if (k < K && unit < UNITS) {
          both = *(const Pair*)(x + (SUMMED ? unit / ROW_UNITS * K : 0) + k);
        }
        of[s][i] = both.first;
        of[s][i + 1] = both.second;
      }
  }
};

// x, times the norm's weight, in fixed point or fp16 for the units of this warp. -> what its digits
// count.
__device__ __forceinline__ float prepare(Team& t, int wl, int lane, const Inputs<u16>& x,
                                         const Inputs<Norm>& norm) {
  float v[STEPS][Inputs<u16>::N], squares = 0, most = 1e-20f;
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int i = 0; i < Inputs<u16>::N; i++) {
      v[s][i] = number(x.of[s][i]);
      if (NORM) {
        squares += v[s][i] * v[s][i];
        v[s][i] *= norm_number(norm.of[s][i]);
      }
      most = fmaxf(most, fabsf(v[s][i]));
    }
  if (NORM) {
#pragma unroll
    for (int o = 16; o; o >>= 1) squares += __shfl_xor_sync(~0u, squares, o);
    if (lane == 0) t.squares[wl] = squares;
  }
  if (PLAIN) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
      if (s * WIDTH + wl < UNITS)
        *(float2*)&t.x[s * WIDTH + wl][lane * 2] = make_float2(v[s][0], v[s][1]);
    __syncwarp();
    return 1;
  }
  // All |v| are below 2^(exponent - 126), and |v * scale| below 2^26, as fp16 below 2^14.
  const u32 exponent = __reduce_max_sync(~0u, __float_as_uint(most)) >> 23;
  const float scale = __uint_as_float((127 + (E4M3 ? 140 : 152) - exponent) << 23);
  float offset = 0;
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const int unit = s * WIDTH + wl;
    if (unit >= UNITS) break;
    u32* digits = &t.digits[unit][0][0];
    if constexpr (E4M3) {
      put_fp16_terms<WORDS, SETS, 1>(digits, v[s], scale, lane);
      continue;
    } else {
      put_digits<WORDS, SETS, E2M1>(digits, v[s], scale, lane);
    }
    __syncwarp();
    const Operands<WORDS, SETS> o(t.digits[unit][lane], lane);
    const u32 ones[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
    const u32 both[4] = {0x11111111u, 0x11111111u, 0x11111111u, 0x11111111u};
    int c4[4] = {0, 0, 0, 0};
#pragma unroll
    for (int m = 0; m < 4; m++) {
      if constexpr (BITS == 4) {
        imma(c4, E2M1 ? ones : both, o.b[m][0][0], o.b[m][1][0]);
        imma(c4, ones, o.b[m][0][1], o.b[m][1][1]);
      } else {
        imma(c4, ones, o.b[m][0][0], o.b[m][1][0]);
      }
      if ((m + 1) % (4 / SETS) == 0) {
        const float sum = (float)(c4[0] + 256 * c4[1]);
        if (lane < 4) t.sums[unit][m / (4 / SETS)][lane] = sum;
        offset += sum;
        c4[0] = c4[1] = c4[2] = c4[3] = 0;
      }
    }
  }
  __syncwarp();
  // 1 / scale, and what else a product is too large by: int4's codes 16, e2m1's 2
  float unit = __uint_as_float((exponent - (E4M3 ? 13 : E2M1 ? 26 : BITS == 4 ? 29 : 25)) << 23);
  if (lane & 1 && !E4M3) unit *= 65536;  // of the digits in this lane's columns
  if (!GROUPED) {
    offset *= unit;
    offset += __shfl_xor_sync(~0u, offset, 1);
    offset += __shfl_xor_sync(~0u, offset, 2);
    if (lane == 0) t.offsets[wl] = offset;
  }
  return unit;
}

typedef SumOf<E4M3, WORDS, E2M1>::Type Sum;

// Where the rows of w of a tile of the launch are, and which of its experts has them.
__device__ __forceinline__ int nth_of(int tile, int unit, int tiles) {
  return SUMMED ? unit / ROW_UNITS : EXPERTS ? tile / tiles : 0;
}
__device__ __forceinline__ long long place_of(const Team& t, int tile, int unit, int tiles) {
  if (!EXPERTS) return tile;
  return (long long)t.experts[nth_of(tile, unit, tiles)] * tiles + (SUMMED ? tile : tile % tiles);
}

// The units of a stage that are of one expert's row, from the one that holds unit w of the stage
// on.
struct Run {
  // Its first unit, block of the row, and place among the slot's scales.
  int begin, first_block, chunk;
  __device__ Run(int s, int w) {
    const int unit = in_row(s * WIDTH + w);
    begin = SUMMED && unit < w ? w - unit : 0;
    first_block = 2 * (unit - (w - begin));
    chunk = begin * UNIT_CHUNKS + (PER_CHUNK > 1 && begin > 0);
  }
};

// The i-th stage of a tile to come. Programs that all read the first inputs of rows, a power of two
// bytes apart, would ask the same part of the memory: 2% of a layer of 7B in bf16.
__device__ __forceinline__ int stage_of(int i) { return (i + blockIdx.x) % STEPS; }

// This warp's unit of a slot, two rows and 16 inputs a lane.
__device__ __forceinline__ void multiply_plain(const Team& t, const unsigned char* stage, int u,
                                               int wl, int lane, float& y0, float& y1) {
  const int row = lane >> 2;
#pragma unroll
  for (int c = lane & 3; c < 8; c += 4) {  // eight inputs
    if (in_row(u) * UNIT + c * 8 >= K) break;
    const float4 first = *(const float4*)&t.x[u][c * 8],
                 second = *(const float4*)&t.x[u][c * 8 + 4];
    const float x[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint4 w = *(const uint4*)(stage + (row + 8 * r) * ROW_BYTES + wl * 128 + c * 16);
      const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float& y = r ? y1 : y0;
        y += number(words[i]) * x[2 * i];
        y += number(words[i] >> 16) * x[2 * i + 1];
      }
    }
  }
}

// 16 rows of a tile times this warp's inputs -> partial.
__device__ __forceinline__ void multiply_tile(Team& t, Place& place, int wl, int lane,
                                              const void* scales, int tile, int tiles, float unit,
                                              float* partial) {
  const int row = lane >> 2, column = lane & 3, half = column >> 1;  // of a product's columns
  float y0 = 0, y1 = 0;
  Sum::Type c[4] = {0, 0, 0, 0};
#pragma unroll 1
  for (int at = 0; at < STEPS; at++) {
    const int s = stage_of(at), u = s * WIDTH + wl, unit_block = 2 * in_row(u);
    const Run run(s, wl);
    float shared[2] = {0, 0};
    if (SHARED_ROWS && u < UNITS && unit_block + half < BLOCKS) {
      const long long chunk =
          place_of(t, tile, u, tiles) * CHUNKS + (unit_block + half) / PER_CHUNK;
      shared[0] = ((const float*)scales)[2 * chunk];
      shared[1] = ((const float*)scales)[2 * chunk + 1];
    }
    wait(&t.full[place.slot], place.parity);
    if (PLAIN && u < UNITS) {
      multiply_plain(t, t.ring[place.slot], u, wl, lane, y0, y1);
    } else if (u < UNITS) {
      const unsigned char* stage = t.ring[place.slot];
      const uint4* from = (const uint4*)(stage + wl * 2048) + lane;
      const uint4 p[2][2] = {{from[0], from[32]}, {from[64], from[96]}};  // [block][row or row + 8]
      const Operands<WORDS, SETS> o(t.digits[u][lane], lane);
#pragma unroll
      for (int m = 0; m < 4; m++) {
        const uint4 low = p[m >> 1][0], high = p[m >> 1][1];
        const u32 a[4] = {m & 1 ? low.z : low.x, m & 1 ? high.z : high.x, m & 1 ? low.w : low.y,
                          m & 1 ? high.w : high.y};
        Sum::add(c, c, a, o.b[m]);
        if (GROUPED && (m + 1) % (4 / SETS) == 0) {
          const int set = m / (4 / SETS);
          const int block = unit_block + (SETS == 1 ? half : SETS == 2 ? set : set >> 1);
          const int part = SETS == 1 ? 0 : SETS == 2 ? half : (set & 1) * 2 + half;
          if (block < BLOCKS) {
            const int chunk = run.chunk + block / PER_CHUNK - run.first_block / PER_CHUNK;
            const float offset = E4M3 ? 0 : t.sums[u][set][column];
            float scale[2] = {shared[0], shared[1]}, zero = E4M3 ? 0 : 1 << (BITS - 1);
#pragma unroll
            for (int i = 0; i < 2; i++) {
              if (!SHARED_ROWS)
                group_of(stage + CODES, (chunk * 16 + row + 8 * i) * PARTS + part, scale[i], zero);
              (i ? y1 : y0) += scale[i] * (Sum::value(c[2 * i], c[2 * i + 1]) - zero * offset);
            }
          }
          c[0] = c[1] = c[2] = c[3] = 0;
        }
      }
    }
    __syncwarp();
    if (lane == 0) arrive(&t.empty[place.slot]);
    place.next();
  }
  if (!GROUPED && !PLAIN) {
    y0 = Sum::value(c[0], c[1]);
    y1 = Sum::value(c[2], c[3]);
  }
  y0 *= unit;
  y1 *= unit;
  // The four lanes of a row: the odd ones take row + 8.
  float mine = column & 1 ? y1 : y0, other = column & 1 ? y0 : y1;
  mine += __shfl_xor_sync(~0u, other, 1);
  mine += __shfl_xor_sync(~0u, mine, 2);
  if (column < 2) partial[row + 8 * column] = mine;
}

extern "C" __global__ void __launch_bounds__((WARPS + TEAMS) * 32, 1)
gemv(const u16* x, const unsigned char* codes, const unsigned char* scales, const long long* perm,
     const Norm* norm, const u16* bias, const u16* residual, const int* active,
     const float* weights, u16* out, int n_out, int tiles, float eps, float limit, float alpha) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int team = warp < WARPS ? warp / WIDTH : warp - WARPS, wl = warp % WIDTH;
  Team& t = ((Team*)shared_memory())[team];
  // route() makes `active`, then come gate and up. The kernel of down starts when these have waited
  // for route().
  if (EXPERTS && GATED) wait_for_kernel_before();
  next_kernel_may_start();
  if (warp >= WARPS) {
    if (lane == 0) {
      for (int i = 0; i < STAGES; i++) {
        init(&t.full[i], FEEDERS);
        init(&t.empty[i], WIDTH);
      }
      t.busy = 0;
      barriers_are_ready();
    }
    // volatile: the cache may have what was there before. Of NaN logits there are fewer experts
    // than EXPERTS.
    const volatile int* found = active;
    for (int i = lane; i < EXPERTS; i += 32) {
      const int count = found[0], expert = found[1 + i];
      t.experts[i] = i < count ? expert : 0;
    }
  }
  __syncthreads();
  const int first = team * gridDim.x + blockIdx.x, step = TEAMS * gridDim.x;
  const int all = tiles * (EXPERTS && GATED ? EXPERTS : 1);

  if (warp >= WARPS) {  // the producer
    if (lane >= FEEDERS) return;
    Place place, back;
    place.parity = 1;
    int flying = 0;
    for (int tile = first; tile < all; tile += step)
      for (int at = 0; at < STEPS; at++) {
        const int s = stage_of(at);
        wait(&t.empty[place.slot], place.parity);
        // A queue of copies delays the loads of x. A layer of 7B takes 33.8 us with 1 slot under
        // way before the products and 2 then, with 1 and 4 34.7 (int4, H200); int8's four
        // products 49.7 with 2 and 2, 51.5 with 1 and 2.
        while (flying >= (t.busy || BITS == 8 ? 2 : 1)) {
          wait(&t.full[back.slot], back.parity);
          back.next();
          flying--;
        }
        flying++;
        unsigned char* slot = t.ring[place.slot];
        for (int w = 0; w < WIDTH && s * WIDTH + w < UNITS;) {
          const Run run(s, w);
          const int units = min(ROW_UNITS - run.first_block / 2, WIDTH - w);
          const int blocks = min(2 * units, BLOCKS - run.first_block);
          const int units_end = w + units;
          if (PLAIN) {
            const int expert = EXPERTS ? t.experts[nth_of(tile, s * WIDTH + w, tiles)] : 0;
            const int k = run.first_block * BLOCK, block = SUMMED || !EXPERTS ? tile : tile % tiles;
            for (int r = FEEDERS == 16 ? lane : 0; r < 16; r += FEEDERS == 16 ? 16 : 1) {
              const int n = min(GATED ? block * 8 + r % 8 : block * 16 + r, n_out - 1) +
                            (GATED && r >= 8 ? n_out : 0);
              const long long row = (long long)expert * n_out * (GATED ? 2 : 1) + n;
              feed(slot + r * ROW_BYTES + w * 128, codes + (row * K + k) * 2,
                   min(units * UNIT, K - k) * 2, slot, codes, 0, &t.full[place.slot], lane);
            }
            w = units_end;
            continue;
          }
          const long long rows = place_of(t, tile, s * WIDTH + w, tiles);
          const int chunk = run.first_block / PER_CHUNK;
          const int chunks = STAGED ? (run.first_block + blocks - 1) / PER_CHUNK - chunk + 1 : 0;
          feed(slot + w * 2048, codes + (rows * BLOCKS + run.first_block) * 1024, blocks * 1024,
               slot + CODES + run.chunk * CHUNK_BYTES,
               scales + (rows * CHUNKS + chunk) * CHUNK_BYTES, chunks * CHUNK_BYTES,
               &t.full[place.slot], lane);
          w = units_end;
        }
        fed(&t.full[place.slot]);
        place.next();
      }
    return;
  }

  const Inputs<Norm> norm_weights(NORM, norm, perm, wl, lane);
  wait_for_kernel_before();
  const float unit = prepare(t, wl, lane, Inputs<u16>(true, x, perm, wl, lane), norm_weights);
  if (wl == 0 && lane == 0) t.busy = 1;
  Place place;
  const int r = lane & 15;
  for (int begin = first; begin < all; begin += WIDTH * step) {
    const int mine = begin + wl * step;  // the tile that this warp stores
    const int nth = nth_of(mine, 0, tiles), row_block = EXPERTS && GATED ? mine % tiles : mine;
    const int n = GATED ? row_block * 8 + (r & 7) : row_block * 16 + r;  // of the outputs
    const int row = n + (GATED && r >= 8 ? n_out : 0);  // of w
    const bool there = mine < all && n < n_out;
    float extra = 0, scale = 1, zero = 0;
    if (there && RESIDUAL) extra += number(residual[n]);
    if (there && BIAS)
      for (int i = SUMMED ? 0 : nth; i < (SUMMED ? EXPERTS : nth + 1); i++) {
        const int expert = EXPERTS ? t.experts[i] : 0;
        extra +=
            number(bias[expert * (GATED ? 2 : 1) * n_out + row]) * (SUMMED ? weights[expert] : 1);
      }
    if (!GROUPED && !PLAIN && mine < all)
      group_of(scales, place_of(t, mine, 0, tiles) * 16 + r, scale, zero);
    for (int j = 0; j < WIDTH && begin + j * step < all; j++)
      multiply_tile(t, place, wl, lane, scales, begin + j * step, tiles, unit, t.partial[wl][j]);
    meet(team);
    if (mine < all) {
      float y = 0;
      for (int w = lane >> 4; w < WIDTH; w += 2) y += t.partial[w][wl][r];
      y += __shfl_xor_sync(~0u, y, 16);
      if (!GROUPED && !PLAIN) {
        float offset = 0;
        for (int w = 0; w < WIDTH; w++) offset += t.offsets[w];
        y = (y - zero * offset) * scale;
      }
      if (NORM) {
        float squares = 0;
        for (int w = 0; w < WIDTH; w++) squares += t.squares[w];
        y *= rsqrtf(squares / K + eps);
      }
      y += extra;
      if (GATED) {
        y = gated<GATED>(y, __shfl_down_sync(~0u, y, 8), limit, alpha);
        if (EXPERTS) y *= weights[t.experts[nth]];
      }
      if (there && lane < (GATED ? 8 : 16))
        out[(EXPERTS && GATED ? nth * n_out : 0) + n] = rounded(y);
    }
    meet(team);  // `partial` is free again
  }
}

#endif
