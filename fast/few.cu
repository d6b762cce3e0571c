// The product of 2 to 8 rows of x with packed weights. packed_few.py explains it. More macros than
// gemv.cu's: CLUSTER (programs that share K), BUSY and IDLE (how many slots may be on their way
// once x is in registers, and before that).

// Else the producer waits for what only it can bring.
static_assert(BUSY <= STAGES && IDLE <= STAGES);
static_assert(!SHARED_ROWS && GROUP % 32 == 0 && !(GATED && (BIAS || RESIDUAL)));
constexpr int ROWS = 8, PIECES = BLOCK / 32;  // of x; of a block: 32 inputs
constexpr int SHARE = (BLOCKS + CLUSTER - 1) / CLUSTER;  // blocks of a row of w that a program has
constexpr int STEPS = (SHARE + WIDTH - 1) / WIDTH;  // blocks of a warp
// Whose sum is scaled at once.
constexpr int PIECES_PER_SUM = GROUP == 32 || GROUP == 64 ? GROUP / 32 : PIECES;
constexpr int X_SUMS = PIECES / PIECES_PER_SUM;  // of a block
constexpr int SLOT_CODES = SHARE * 1024,
              SLOT = SLOT_CODES + (GROUPED ? SHARE / PER_CHUNK + 2 : 0) * CHUNK_BYTES;
constexpr int TILE_ROWS = GATED ? 8 : 16;  // outputs of a tile and a row of x
constexpr int SOURCES = CLUSTER * WIDTH;  // warps that have a sum of each output
constexpr int PAIRS = ROWS / 2 / CLUSTER;  // of rows of x, whose sums a program adds up
// Of a program for a tile: each adds up two places of `partial` over all sources.
constexpr int TASKS = 4 * PAIRS;
constexpr int MINE = (TASKS + WIDTH - 1) / WIDTH;  // tasks of a warp

struct Program {
  alignas(128) unsigned char ring[STAGES][SLOT];
  // Each warp's sums of a tile, and of the next one; 2 for the banks' sake.
  float4 partial[2][SOURCES][8 * PAIRS + 2];
  float2 x_sums[WIDTH][STEPS][X_SUMS][ROWS / 2];  // each warp's sums of x over groups
  float squares[SOURCES][2 * PAIRS];
  u64 full[STAGES], empty[STAGES], complete[2], squared;
  volatile int busy;
};

#ifndef CUDA_ON_CPU

#if CLUSTER > 1
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ u32 address_in(const void* p, int rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address(p)), "r"(rank));
  return there;
}
// Stores into another program's memory, whose barrier counts the bytes. Ordinary stores would need
// a fence, which took 1 us a tile.
__device__ __forceinline__ void send(float* p, float y, u64* b, int rank) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
          address_in(p, rank)),
      "r"(__float_as_uint(y)), "r"(address_in(b, rank))
      : "memory");
}
__device__ __forceinline__ void send(float4* p, float4 y, u64* b, int rank) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address_in(p, rank)),
      "r"(__float_as_uint(y.x)), "r"(__float_as_uint(y.y)), "r"(__float_as_uint(y.z)),
      "r"(__float_as_uint(y.w)), "r"(address_in(b, rank))
      : "memory");
}
__device__ __forceinline__ void expect(u64* b, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared.b64 [%0], %1;" ::"r"(address(b)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void meet_all() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}
#else
__device__ __forceinline__ int cluster_rank() { return 0; }
template <class T> __device__ __forceinline__ void send(T*, T, u64*, int) {}
__device__ __forceinline__ void expect(u64*, int) {}
__device__ __forceinline__ void meet_all() { __syncthreads(); }
#endif

#endif

// Stores y in the memory of program `rank`, which waits for it at barrier b.
template <class T> __device__ __forceinline__ void put(T* p, T y, u64* b, int rank) {
  if (rank == cluster_rank()) *p = y;
  else send(p, y, b, rank);
}
// Once this warp has put everything. Thread 0 also announces so many bytes from each warp of the
// other programs.
__device__ __forceinline__ void arrive_with_others(u64* b, int bytes) {
  __syncwarp();
  if (threadIdx.x % 32) return;
  if (CLUSTER > 1 && threadIdx.x == 0) expect(b, (SOURCES - WIDTH) * bytes);
  arrive(b);
}

// What the lanes of a matrix instruction want of x: lane 4g + t has, of row g, inputs 8 i + 2 t and
// 8 i + 2 t + 1 of a piece as word i.
struct Inputs {
  u32 of[STEPS][PIECES][4];
};

// Lanes t = 0..3 have words of inputs 8 t + 2 i -> 8 i + 2 t
__device__ __forceinline__ void transpose(u32 (&words)[4], int t) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & distance) continue;
      const u32 sent = t & distance ? words[i] : words[i + distance];
      const u32 got = __shfl_xor_sync(~0u, sent, distance);
      (t & distance ? words[i] : words[i + distance]) = got;
    }
}

__device__ __forceinline__ void to_words(u32 (&words)[4], const u16* p, bool there) {
  const uint4 w = there ? *(const uint4*)p : uint4{0, 0, 0, 0};
  words[0] = w.x;
  words[1] = w.y;
  words[2] = w.z;
  words[3] = w.w;
}

// Of M rows of x [M, K] the blocks begin + wl, begin + wl + WIDTH ..., times the norm's weight if
// there is a norm, as fp16, times a power of two that this warp has for each row. `units`: by what
// a sum of products is multiplied in the end, in a lane's two columns.
__device__ __forceinline__ void load(Inputs& b, float (&units)[2], Program& p, const u16* x,
                                     const u16* norm, int M, int begin, int end, int wl, int lane) {
  const int row = lane >> 2, column = lane & 3;
  u32 weights[STEPS][PIECES][4];
  const auto each_piece = [&](auto f) {
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int i = 0; i < PIECES; i++) {
        const int block = begin + s * WIDTH + wl, k = block * BLOCK + i * 32 + column * 8;
        f(b.of[s][i], weights[s][i], k, block < end && k < K);
      }
  };
  const auto each_pair = [&](auto f) {  // of numbers, times the norm's weights
    each_piece([&](u32 (&words)[4], u32 (&factors)[4], int, bool) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float first = number(words[j]), second = number(words[j] >> 16);
        if (NORM) {
          first *= number(factors[j]);
          second *= number(factors[j] >> 16);
        }
        f(words[j], first, second);
      }
    });
  };
  if (NORM)
    each_piece([&](u32 (&)[4], u32 (&factors)[4], int k, bool there) {
      to_words(factors, norm + k, there);
    });
  wait_for_kernel_before();
  each_piece([&](u32 (&words)[4], u32 (&)[4], int k, bool there) {
    to_words(words, x + (long long)row * K + k, there && row < M);
  });
  float squares = 0, most = 1e-20f;
  each_pair([&](u32 word, float first, float second) {
    if (NORM) squares += number(word) * number(word) + number(word >> 16) * number(word >> 16);
    most = fmaxf(most, fmaxf(fabsf(first), fabsf(second)));
  });
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    squares += __shfl_xor_sync(~0u, squares, distance);
    most = fmaxf(most, __shfl_xor_sync(~0u, most, distance));
  }
  if (NORM && column == 0)
    put(&p.squares[cluster_rank() * WIDTH + wl][row % (2 * PAIRS)], squares, &p.squared,
        row / (2 * PAIRS));
  // All numbers are below 2^(exponent - 126), and scaled below 2^14. Every other pair of int4's
  // codes counts 16 times, so its x is divided by 16.
  const u32 exponent = min(__float_as_uint(most) >> 23, 243u);
  const float scale =
      __uint_as_float((267 - exponent) << 23) * (BITS == 4 && column & 1 ? 0.0625f : 1);
  each_pair([&](u32& word, float first, float second) {
    word = two_halves(first * scale, second * scale);
  });
  each_piece([&](u32 (&words)[4], u32 (&)[4], int, bool) { transpose(words, column); });
#pragma unroll
  for (int i = 0; i < 2; i++)
    units[i] = __uint_as_float((__shfl_sync(~0u, exponent, (column * 2 + i) * 4) + 11) << 23);
}

// c += 16 rows of w times x, both 32 inputs.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&w)[2][4], const u32 (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 a[4] = {w[0][i], w[1][i], w[0][i + 1], w[1][i + 1]};
    hmma(c, a, x[i], x[i + 1]);
  }
}

// Codes of a piece as pairs of fp16, without a conversion: the bits of a code below 1,024 are 2^-24
// times the code, and fp16's small numbers are exact. Of int4 every other pair is 16 times as
// large.
__device__ __forceinline__ void to_halves(u32 (&w)[4], const uint4& codes, int piece) {
  const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  if (BITS == 4) {
    const u32 first = words[piece], second = first >> 8;
    w[0] = first & 0x000f000f;
    w[1] = first & 0x00f000f0;
    w[2] = second & 0x000f000f;
    w[3] = second & 0x00f000f0;
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      w[i] = __byte_perm(words[piece * 2 + i / 2], 0, i % 2 ? 0x4342 : 0x4140);
  }
}

// The sums of this warp's x over groups, which zero points multiply
__device__ __forceinline__ void sum_inputs(float2 (&x_sums)[STEPS][X_SUMS][ROWS / 2],
                                           const Inputs& b, int lane) {
  const u32 one = 0x00010001, other = BITS == 4 ? 0x00100010 : one;
  const u32 ones[2][4] = {{one, other, one, other}, {one, other, one, other}};
  float c[4] = {};
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      multiply(c, ones, b.of[s][i]);
      if ((i + 1) % PIECES_PER_SUM) continue;
      if (lane < 4) x_sums[s][i / PIECES_PER_SUM][lane] = {c[0], c[1]};
      c[0] = c[1] = c[2] = c[3] = 0;
    }
  __syncwarp();
}

// y = 16 rows of a tile times this warp's inputs. slot: the tile's codes and scales; of_rows: the
// scales and zero points of two rows, where a row is one group.
__device__ __forceinline__ void multiply_tile(const unsigned char* slot, const Inputs& b,
                                              const float2 (&x_sums)[STEPS][X_SUMS][ROWS / 2],
                                              int begin, int end, int wl, int lane,
                                              const float2 (&of_rows)[2], float (&y)[4]) {
  const int row = lane >> 2, column = lane & 3;
  uint4 codes[STEPS][2];
#pragma unroll
  for (int s = 0; s < STEPS; s++)
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (begin + s * WIDTH + wl < end)
        codes[s][r] = ((const uint4*)(slot + (s * WIDTH + wl) * 1024))[32 * r + lane];
#pragma unroll
  for (int s = 0; s < STEPS; s++) {
    const int block = begin + s * WIDTH + wl;
    if (block >= end) break;
    float c[4] = {};
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      u32 w[2][4];
      to_halves(w[0], codes[s][0], i);
      to_halves(w[1], codes[s][1], i);
      multiply(c, w, b.of[s][i]);
      if ((i + 1) % PIECES_PER_SUM) continue;
      const float2 sum = x_sums[s][i / PIECES_PER_SUM][column];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float scale = of_rows[r].x, zero = of_rows[r].y;
        const int chunk = block / PER_CHUNK - begin / PER_CHUNK;
        if (GROUPED)
          group_of(slot + SLOT_CODES, (chunk * 16 + row + 8 * r) * PARTS + i / PIECES_PER_SUM,
                   scale, zero);
        y[2 * r] += scale * (c[2 * r] - zero * sum.x);
        y[2 * r + 1] += scale * (c[2 * r + 1] - zero * sum.y);
        c[2 * r] = c[2 * r + 1] = 0;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__((WIDTH + 1) * 32, 1)
few(const u16* x, const unsigned char* codes, const unsigned char* scales, const u16* norm,
    const u16* bias, const u16* residual, u16* out, int M, int n_out, int tiles, float eps) {
  const int wl = threadIdx.x / 32, lane = threadIdx.x % 32;
  Program& p = *(Program*)shared_memory();
  next_kernel_may_start();
  if (wl == WIDTH && lane == 0) {
    for (int i = 0; i < STAGES; i++) {
      init(&p.full[i], FEEDERS);
      init(&p.empty[i], WIDTH);
    }
    init(&p.complete[0], WIDTH);
    init(&p.complete[1], WIDTH);
    init(&p.squared, WIDTH);
    p.busy = 0;
    barriers_are_ready();
  }
  meet_all();
  const int rank = cluster_rank(), first = blockIdx.x / CLUSTER, step = gridDim.x / CLUSTER;
  const int begin = rank * SHARE, end = min(begin + SHARE, BLOCKS);

  if (wl == WIDTH) {  // the producer
    Place place, back;
    place.parity = 1;
    int flying = 0;
    if (lane < FEEDERS)
      for (int tile = first; tile < tiles; tile += step) {
        wait(&p.empty[place.slot], place.parity);
        while (flying >= (p.busy ? BUSY : IDLE)) {
          wait(&p.full[back.slot], back.parity);
          back.next();
          flying--;
        }
        flying++;
        const int chunk = begin / PER_CHUNK,
                  chunks = GROUPED ? (end - 1) / PER_CHUNK - chunk + 1 : 0;
        feed(p.ring[place.slot], codes + ((long long)tile * BLOCKS + begin) * 1024,
             (end - begin) * 1024, p.ring[place.slot] + SLOT_CODES,
             scales + ((long long)tile * CHUNKS + chunk) * CHUNK_BYTES, chunks * CHUNK_BYTES,
             &p.full[place.slot], lane);
        fed(&p.full[place.slot]);
        place.next();
      }
    return;
  }

  Inputs b;
  float units[2];
  load(b, units, p, x, norm, M, begin, end, wl, lane);
  sum_inputs(p.x_sums[wl], b, lane);
  if (wl == 0 && lane == 0) p.busy = 1;
  // In a task lane 2 n + f reads place f of sources n, n + 16 ... A place holds the products of two
  // rows of w, 8 apart, with two rows of x.
  const int row = lane >> 2, column = lane & 3;
  const auto task = [&](int j) { return wl + j * WIDTH; };
  const auto place_of = [&](int j) { return task(j) * 2 + (lane & 1); };
  const auto m_of = [&](int j, int c) { return (rank * PAIRS + place_of(j) % PAIRS) * 2 + c % 2; };
  const auto n_of = [&](int tile, int j, int c) {
    return tile * TILE_ROWS + place_of(j) / PAIRS + c / 2 * 8;
  };
  float factors[MINE][2];
  if (NORM) {
    arrive_with_others(&p.squared, 2 * PAIRS * 4);
    wait(&p.squared, 0);
  }
#pragma unroll
  for (int j = 0; j < MINE; j++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float squares = 0;
      if (NORM)
        for (int source = 0; source < SOURCES; source++)
          squares += p.squares[source][m_of(j, i) % (2 * PAIRS)];
      factors[j][i] = NORM ? rsqrtf(squares / K + eps) : 1;
    }
  float outputs[MINE][4];
  const auto stored = [&](int tile, int j, int c) {
    return task(j) < TASKS && lane < 2 && m_of(j, c) < M && n_of(tile, j, c) < n_out &&
           (!GATED || c < 2);
  };
  // The outputs of the i-th tile of this program
  const auto gather = [&](int tile, int i) {
    float extra[MINE][4] = {};
#pragma unroll
    for (int j = 0; j < MINE; j++)
#pragma unroll
      for (int c = 0; c < 4; c++) {
        if (!(RESIDUAL || BIAS) || !stored(tile, j, c)) continue;
        if (RESIDUAL)
          extra[j][c] += number(residual[(long long)m_of(j, c) * n_out + n_of(tile, j, c)]);
        if (BIAS) extra[j][c] += number(bias[n_of(tile, j, c)]);
      }
    wait(&p.complete[i & 1], i >> 1 & 1);
#pragma unroll
    for (int j = 0; j < MINE; j++) {
      if (task(j) >= TASKS) break;
      float (&y)[4] = outputs[j];
      y[0] = y[1] = y[2] = y[3] = 0;
#pragma unroll
      for (int source = 0; source < SOURCES; source += 16) {
        if (source + lane / 2 >= SOURCES) continue;
        const float4 part = p.partial[i & 1][source + lane / 2][place_of(j)];
        y[0] += part.x;
        y[1] += part.y;
        y[2] += part.z;
        y[3] += part.w;
      }
#pragma unroll
      for (int c = 0; c < 4; c++) {
#pragma unroll
        for (int distance = 2; distance < 32; distance *= 2)
          y[c] += __shfl_xor_sync(~0u, y[c], distance);
        y[c] = y[c] * factors[j][c % 2] + extra[j][c];
      }
      if (GATED)
#pragma unroll
        for (int c = 0; c < 2; c++) y[c] = gated<GATED>(y[c], y[c + 2], 0, 0);
    }
  };
  const auto store = [&](int tile) {
#pragma unroll
    for (int j = 0; j < MINE; j++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (stored(tile, j, c))
          out[(long long)m_of(j, c) * n_out + n_of(tile, j, c)] = rounded(outputs[j][c]);
  };
  Place place;
  int i = 0;  // tiles so far
  for (int tile = first; tile < tiles; tile += step, i++) {
    float2 of_rows[2];
    if (!GROUPED)
#pragma unroll
      for (int r = 0; r < 2; r++)
        group_of(scales, tile * 16ll + row + 8 * r, of_rows[r].x, of_rows[r].y);
    float y[4] = {};
    wait(&p.full[place.slot], place.parity);
    multiply_tile(p.ring[place.slot], b, p.x_sums[wl], begin, end, wl, lane, of_rows, y);
    __syncwarp();
    if (lane == 0) arrive(&p.empty[place.slot]);
    place.next();
    // The tile before only now: the slowest warp has finished it. After that every warp has also
    // read the one before it, so that its buffer is free.
    if (i) gather(tile - step, i - 1);
    put(&p.partial[i & 1][rank * WIDTH + wl][row * PAIRS + column % PAIRS],
        float4{y[0] * units[0], y[1] * units[1], y[2] * units[0], y[3] * units[1]},
        &p.complete[i & 1], column / PAIRS);
    arrive_with_others(&p.complete[i & 1], 8 * PAIRS * 16);
    if (i) store(tile - step);
  }
  if (i) {
    gather(first + (i - 1) * step, i - 1);
    store(first + (i - 1) * step);
  }
}
