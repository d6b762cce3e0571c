// All layers of a decode step of one row in one launch. step.py has the words and the drawing. The
// pieces stand in front of this, in this order:
//
//     common.cu           what gemv.cu and few.cu have, too: digits, operands, what PTX does
//     step_base.cu        words, a layer's numbers, sizes of products, a program's memory
//     step_product.cu     a product of one row
//     step_router.cu      a mixture's choice of experts
//     step_attention.cu   attention
//     step_delta.cu       a recurrent layer's mixer
//
// Here is what runs them: the producer, which copies what they read, and the kernel. Where to begin:
// the two loops at the end.

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

  // 16-bit weights: a slot has the first 64 inputs of each of a tile's rows, 128 bytes, then the next
  // 64 of each, and so on.
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
      copy_box(p.slot(at) + p.lane * S::COPY_UNITS * 2048, map, tile * S::TILE_OUTPUTS,
               P::in_row(unit) * (S::UNIT_INPUTS / 64),
               O::EXPERTS ? p.s->experts[P::nth_of(mine, unit)] : 0, &p.s->full[at % STAGES]);
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
    const typename Product<O>::RowPart row_part(nth_slot, w);
    const bool begins = w < w_end && row_part.begin == w;
    const int units = min(S::ROW_UNITS - row_part.first_block / 2, w_end - w);
    const int blocks = min(2 * units, S::BLOCKS - row_part.first_block);
    const int chunk = row_part.first_block / S::PER_CHUNK;
    const int chunk_bytes =
        S::GROUPED
            ? ((row_part.first_block + blocks - 1) / S::PER_CHUNK - chunk + 1) * S::CHUNK_BYTES
            : 0;
    const int at = begin(__reduce_add_sync(~0u, begins ? blocks * 1024 + chunk_bytes : 0));
    unsigned char* slot = p.slot(at);
    u64* full = &p.s->full[at % STAGES];
    const int expert = begins ? p.s->experts[(nth_slot * SQUAD_WARPS + w) / S::ROW_UNITS] : 0;
    if (begins) {
      const long long rows = (long long)expert * S::TILES + tile;
      copy(slot + w * 2048, codes + (rows * S::BLOCKS + row_part.first_block) * 1024, blocks * 1024,
           full);
      if (S::GROUPED)
        copy(slot + S::CODE_BYTES + row_part.chunk * S::CHUNK_BYTES,
             scales + (rows * S::CHUNKS + chunk) * S::CHUNK_BYTES, chunk_bytes, full);
    }
    __syncwarp();
  }

  // The cache, as this program's tasks of attention read it. Lane 0 copies the keys, one lane each
  // box of values, and two more the scales of an int8 cache.
  __device__ __forceinline__ void feed_cache(const Layer& layer, int position) {
    p.reload_ids();
    const Splits splits(position, (int)(u32)layer.fields[LENGTH_AND_WINDOW]);
#pragma unroll 1
    for (int n = first_task(); n < splits.tasks(); n += PROGRAMS) {
      const Task task(n, splits, position);
#pragma unroll 1
      for (int row = task.begin; row < task.end; row += CACHE_ROWS) {
        const int length = (int)(layer.fields[LENGTH_AND_WINDOW] >> 32);
        const int first = row / 4 * 4;  // copied scales begin at a multiple of 16 bytes
        const int boxes = INT8_CACHE ? 1 : splits.slices;  // of values
        const int scale_bytes = INT8_CACHE ? 4 * min(SLOT_SCALES, length - first) : 0;
        const int at = begin(KEY_BYTES + boxes * VALUE_BYTES + 2 * scale_bytes);
        u64* full = &p.s->full[at % STAGES];
        const int nth = p.lane - 1;
        if (p.lane == 0)
          copy_box(p.slot(at), layer.at<void>(K_MAP), row, task.kv, 0, full);
        else if (nth < boxes)
          copy_box(p.slot(at) + KEY_BYTES + nth * VALUE_BYTES, layer.at<void>(V_MAP), row, task.kv,
                   (INT8_CACHE ? task.slice / 2 : task.slice) + nth, full);
        else if (INT8_CACHE && nth < boxes + 2)
          copy(p.slot(at) + KEY_BYTES + VALUE_BYTES + (nth - boxes) * SLOT_SCALES * 4,
               layer.at<float>(nth == boxes ? K_SCALES : V_SCALES) + (long long)task.kv * length +
                   first,
               scale_bytes, full);
        __syncwarp();
      }
    }
  }

#if RECURRENT
  // Of a recurrent layer's tasks, what is kept of the text.
  __device__ __forceinline__ void feed_text(const Layer& layer, int position) {
    p.reload_ids();
#pragma unroll 1
    for (int h = first_task(); h < Delta::VALUE_HEADS; h += PROGRAMS) {
      const DeltaTask m(h, position);
      constexpr int BYTES = SLOT_ROWS * VALUE_DIM * 4;
      const auto state = layer.at<const unsigned char>(STATES) + 4 * m.state(m.block);
#pragma unroll 1
      for (int i = 0; i < STATE_SLOTS; i++) {
        const int at = begin(BYTES);
        if (p.lane == 0) copy(p.slot(at), state + i * BYTES, BYTES, &p.s->full[at % STAGES]);
      }
      feed_rows(m.at, KEY_DIM * 4,
                layer.at<const float>(KEYS) +
                    (m.row_of(p.lane) * Delta::KEY_HEADS + m.key_head) * KEY_DIM);
      feed_rows(m.at, VALUE_DIM * 4,
                layer.at<const float>(CORRECTIONS) +
                    (m.row_of(p.lane) * Delta::VALUE_HEADS + m.h) * VALUE_DIM);
    }
  }
  // A slot of n rows of so many bytes. from: the lane's.
  __device__ __forceinline__ void feed_rows(int n, int bytes, const void* from) {
    const int at = begin(n * bytes);
    if (p.lane < n) copy(p.slot(at) + p.lane * bytes, from, bytes, &p.s->full[at % STAGES]);
    __syncwarp();
  }
#endif

  template <class O>
  __device__ __forceinline__ void feed(const Layer& layer, int which) {
    typedef Sizes<O> S;
    p.reload_ids();
    const int my_tiles = share_of(S::ALL), field = which * PER_PRODUCT;
    const unsigned char* codes = layer.at<const unsigned char>(field + CODES);
    const unsigned char* scales = layer.at<const unsigned char>(field + SCALES);
#pragma unroll 1
    for (int t = 0; t < my_tiles; t++)
#pragma unroll 1
      for (int n = 0; n < S::TILE_SLOTS; n++) {
        const int mine = blockIdx.x + t * PROGRAMS;
        if constexpr (S::PLAIN) feed_plain_slot<O>(codes, mine, n);
        else if constexpr (S::SUMMED) feed_summed_slot<O>(codes, scales, mine, n);
        else feed_slot<O>(codes, scales, mine, n);
      }
  }

};

// x [D], positions [1] -> y [D], what leaves the last layer. layers: FIELDS numbers each. started:
// how many programs have begun, ever; it numbers the steps. qkv, split_sums, attended, middle, logits,
// gated, ends: words. rank_words [RANKS + 1]: the address of the words in each rank's memory, see
// sum_of_ranks(), and then this rank's number.
extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, 1)
whole_step(const u16* x, const long long* positions, u16* y, const u64* layers, u64* started,
           u64* qkv, u64* split_sums, u64* attended, u64* middle, u64* logits, u64* gated, u64* ends,
           const u64* rank_words, float eps, float qk_eps, float scale, float route_scale,
           float limit, float alpha) {
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
  if (threadIdx.x < RANKS) s.rank_words[threadIdx.x] = (u64*)rank_words[threadIdx.x];
  if (threadIdx.x == 0) s.rank = (int)rank_words[RANKS];
  if (threadIdx.x < 2 * FIELDS)
    s.fields[threadIdx.x / FIELDS][0][threadIdx.x % FIELDS] = layers[threadIdx.x % FIELDS];
  for (int t = p.warp; t < share_of(Sizes<Wo>::ALL); t += WARPS + 1) {
    constexpr int ROWS = Sizes<Wo>::TILE_ROWS;
    const int n = (blockIdx.x + t * PROGRAMS) * ROWS + lane;
    if (lane < 16) s.residual[t][lane] = lane < ROWS && n < D ? number(x[n]) : 0;
  }
#if CHOSEN
  for (int e = threadIdx.x; e < SUMS; e += (WARPS + 1) * 32) s.previous[e] = 0;
  for (int i = threadIdx.x; i < CANDIDATES; i += (WARPS + 1) * 32) s.candidates[i] = NO_KEY;
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
  //  1. In step_base.cu a place in the enum of products and in OPERATIONS, here a line in each of
  //     the loops, and one in map_at(). RESIDUAL says that its tiles are Wo's, whose rows of the
  //     stream s.residual has; NORM without GATED, that it is a layer's first (ENTERS and MEASURES
  //     in step_product.cu). EIGHT_ROWS is decided in step.py's operations().
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
      if (layer.is_recurrent()) {
#if RECURRENT
        producer.feed<In>(layer, QKV);
        producer.feed_text(layer, position);
#endif
      } else {
        producer.feed<Qkv>(layer, QKV);
        producer.feed_cache(layer, position);
      }
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
    const auto post_norm = [](const Layer& of, int which) {
      return of.at<const Product<Qkv>::Norm>(which * PER_PRODUCT + NORM_WEIGHT);
    };
    // The fields of the layer before are still there; those of the next take their place below. The
    // first layer, which has none before it, does not ask for that norm.
    const Layer layer_before{s.fields[1][(i + 1) & 1]};
    const u64* enters = i ? ends : (const u64*)x;
    const u32 enters_tag = i ? tag - 1 : 0;
    if (layer.is_recurrent()) {
#if RECURRENT
      Product<In>::run<InOrder>(p, layer, QKV, enters, enters_tag, qkv, tag);
#endif
    } else {
      Product<Qkv>::run<InOrder>(p, layer, QKV, enters, enters_tag, qkv, tag, nullptr,
                                 post_norm(layer_before, DOWN));
    }
    if (!share_of(FEWEST_FIRST)) meet();  // as run() does where there are tiles
    // All warps have finished the layer before, whose fields are now overwritten.
    if (i + 1 < LAYERS && p.warp == 0 && lane < FIELDS)
      copy_word(&s.fields[1][(i + 1) % 2][lane], layers + (i + 1) * FIELDS + lane);
    if (layer.is_recurrent()) {
#if RECURRENT
#pragma unroll 1
      for (int h = first_task(); h < Delta::VALUE_HEADS; h += PROGRAMS)
        apply_delta(p, layer, h, enters, enters_tag, qkv, attended, tag, position, qk_eps);
#endif
    } else {
      const Splits splits(position, (int)(u32)layer.fields[LENGTH_AND_WINDOW]);
#pragma unroll 1
      for (int task = first_task(); task < splits.tasks(); task += PROGRAMS) {
        if (task != first_task()) meet();  // all warps have put the task before together
        attend(p, layer, task, splits, qkv, split_sums, attended, tag, position, qk_eps, scale);
      }
      if (splits.n > 1) combine(p, layer, splits.n, qkv, split_sums, attended, tag);
    }
    Product<Wo>::run<Product<Up>>(p, layer, WO, attended, tag, middle, tag);
#if CHOSEN
    add_to_logits(p, layer, logits);
    if (CHOOSES) choose_experts(p, layer, logits, route_scale);
#endif
    Product<Up>::run<Product<Down>>(p, layer, UP, middle, tag, gated, tag, nullptr,
                                    post_norm(layer, WO));
    wait_for_copies();
    if (!share_of(Sizes<Down>::ALL)) meet();  // else they meet within
    Product<Down>::run<Product<Qkv>>(p, layer, DOWN, gated, tag, ends, tag,
                                     i + 1 == LAYERS ? y : nullptr);
    if (POST_NORMS && i + 1 == LAYERS && blockIdx.x == 0) {
      u32 pairs[Product<Qkv>::ROUNDS][Product<Qkv>::INPUTS / 2];
      Product<Qkv>::add_branch(p, pairs, ends, tag, post_norm(layer, DOWN), y);
    }
  }
}
