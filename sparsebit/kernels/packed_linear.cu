// y = x W^T with a weight of 2, 3, 4 or 8 bits that stays packed. `tensor_core_layout.py` defines the order of its codes.
//
// Words hold the codes that one lane has of 16 x 16 tiles of W in a tensor-core product (mma.m16n8k16, A operand:
// registers 0 to 3). A code of up to 4 bits becomes a 16-bit float without a conversion: its bits are put into the lowest
// bits of the mantissa of the number BASE (MAGIC holds two of these), and the result is BASE + code, exactly. A code of 8
// bits consists of two such codes, its lower and its upper four bits.
//
// One file holds all kernels; `packed_linear.py` compiles one of them at a time, for fixed sizes. It writes these macros in
// front of the file: KERNEL (which one), BITS, HALF (float16, else bfloat16), HAS_ZERO (zero points are given, else all are
// the middle code), GT (how many tiles of 16 along K share a scale: 2, 4 or 8), and the sizes that each kernel lists.
typedef unsigned int u32;
#if HALF
#define MAGIC 0x64006400u
#define BASE 1024.f
#define ONES 0x3C003C00u
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#define SUB2 "sub.f16x2 "
#define MUL2 "mul.f16x2 "
#define FMA2 "fma.rn.f16x2 "
#define SIXTEEN 0x4C004C00u
#define PART (BITS == 2 ? 0x34003400u : 0x30003000u)  // 1/4, 1/8
#else
#define MAGIC 0x43004300u
#define BASE 128.f
#define ONES 0x3F803F80u
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#define SUB2 "sub.bf16x2 "
#define MUL2 "mul.bf16x2 "
#define FMA2 "fma.rn.bf16x2 "
#define SIXTEEN 0x41804180u
#define PART (BITS == 2 ? 0x3E803E80u : 0x3E003E00u)  // 1/4, 1/8
#endif

__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(MMA "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// (w & mask) | MAGIC in one instruction: two codes as BASE + code.
__device__ __forceinline__ u32 nibbles(u32 w, u32 mask) {
  u32 r; asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(w), "r"(mask), "r"(MAGIC)); return r;
}
__device__ __forceinline__ u32 sub2(u32 a, u32 b) { u32 r; asm(SUB2 "%0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { u32 r; asm(MUL2 "%0, %1, %2;" : "=r"(r) : "r"(a), "r"(b)); return r; }
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 r; asm(FMA2 "%0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c)); return r;
}
__device__ __forceinline__ float to_float(unsigned short h) {
#if HALF
  float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f;
#else
  return __uint_as_float(((u32)h) << 16);
#endif
}
__device__ __forceinline__ unsigned short from_float(float f) {
  unsigned short h;
#if HALF
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
#endif
  return h;
}
__device__ __forceinline__ uint4 stream(const uint4* p) {
  uint4 v; asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p)); return v;
}
// The first thing that a program does: the one after it may start now, and it waits for the one before it. Both matter only
// where a launch allows the overlap. What is read after it must not count as constant, or the compiler may read it before.
__device__ __forceinline__ void let_next_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// The words that a lane has of 16 outputs and 128 k, and the place of its words among those of all lanes
// (`tensor_core_layout.py`).
#define MIDDLE (1 << (BITS - 1))
#define BLOCK_VECTORS (16 * BITS)
#define VECTORS (BITS < 4 ? 1 : BITS / 2)
struct Words { u32 at[2 * BITS]; };
__device__ __forceinline__ int place_of(int lane) { return lane ^ ((lane >> 3) & 3); }
__device__ __forceinline__ void put(Words& w, int first, uint4 v) {
  w.at[first] = v.x; w.at[first + 1] = v.y; w.at[first + 2] = v.z; w.at[first + 3] = v.w;
}
__device__ __forceinline__ Words words_at(const uint4* block, int lane) {
  Words w;
  lane = place_of(lane);
  #pragma unroll
  for (int i = 0; i < VECTORS; i++) put(w, 4 * i, stream(block + 32 * i + lane));
#if BITS == 3
  const uint2* p = (const uint2*)(block + 32) + lane;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0,%1}, [%2];" : "=r"(w.at[4]), "=r"(w.at[5]) : "l"(p));
#endif
  return w;
}
// Register i of tile j: BASE + FACTOR(i & 1) * code; with 8 bits `lower` and `upper` have four bits each. Codes of 2 and 3
// bits for the lower rows of a tile stay at higher bits of the mantissa, which saves a shift: they count FACTOR times.
#define FACTOR(half) ((half) && BITS < 4 ? 1 << BITS : 1)
__device__ __forceinline__ int word_of(int j, int i) { return 4 * (j >> 2) + 2 * (j & 1) + (i >> 1); }
__device__ __forceinline__ int shift_of(int j, int i) { return 8 * ((j >> 1) & 1) + 4 * (i & 1); }
__device__ __forceinline__ u32 lower(const Words& w, int j, int i) {
#if BITS >= 4
  return nibbles(w.at[word_of(j, i)] >> shift_of(j, i), 0x000F000Fu);
#elif BITS == 2
  return nibbles(w.at[word_of(j & 1, i)] >> (4 * (j >> 1)), i & 1 ? 0x000C000Cu : 0x00030003u);
#else
  const int first = 3 * (j >> 2), n = 2 * (j & 3) + (i >> 1);
  if (i & 1) return nibbles(w.at[first + (n < 6 ? n / 2 : n - 6)] >> (n < 6 ? 6 * (n & 1) : 9), 0x00380038u);
  if (n < 7) return nibbles(w.at[first + (n < 6 ? n / 2 : 2)] >> (n < 6 ? 6 * (n & 1) : 12), 0x00070007u);
  u32 r = nibbles(w.at[first] >> 15, 0x00010001u);
  r |= (w.at[first + 1] >> 14) & 0x00020002u;
  return r | ((w.at[first + 2] >> 13) & 0x00040004u);
#endif
}
#if BITS == 8
__device__ __forceinline__ u32 upper(const Words& w, int j, int i) { return nibbles(w.at[8 + word_of(j, i)] >> shift_of(j, i), 0x000F000Fu); }
#endif
__device__ __forceinline__ u32 zero_pair(u32 z, int half) {
#if BITS == 8
  z = from_float((float)z); return z | (z << 16);
#else
  z *= FACTOR(half); return MAGIC | z | (z << 16);
#endif
}
// (code - zero) * scale of two codes. The difference is exact; the product is rounded once, as in `definition`.
__device__ __forceinline__ u32 value(const Words& w, int j, int i, u32 zero, u32 scale) {
#if BITS == 8
  return mul2(sub2(fma2(sub2(upper(w, j, i), MAGIC), SIXTEEN, sub2(lower(w, j, i), MAGIC)), zero), scale);
#else
  u32 d = sub2(lower(w, j, i), zero);
#if BITS < 4
  if (i & 1) d = mul2(d, PART);
#endif
  return mul2(d, scale);
#endif
}

#define FEW_ROWS 1
#define SOME_ROWS 2
#define DEQUANTIZE 3
#define REORDER 4
#define SUM_PARTS 5
#define MANY_ROWS 6
#define SUM_SPANS 7

#if KERNEL == FEW_ROWS
// A load of x. It is volatile, because the compiler may move loads of memory that counts as constant to before
// `griddepcontrol.wait`, when the previous program has not written x yet.
__device__ __forceinline__ uint4 fresh(const unsigned short* at) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
// Few rows: loading the weight is the whole cost. The warps of a block share 16 RT outputs and split K; x is read from L1
// and L2. The weight is not unpacked at all: the sum over a group is scaled instead. tmp = sum x (BASE + code), and
// sx = sum x by a product with ones, so that the sum of x (code - zero) is tmp - (BASE + zero) sx.
// RT: tiles of 16 outputs in a block. MB: multiples of 8 rows of x. WARPS. MINB: blocks on a multiprocessor. DEPTH: how
// many groups ahead words are loaded. AHEAD: scales are loaded together with words, else when their group is computed.
extern "C" __global__ void __launch_bounds__(WARPS * 32, MINB) few_rows(
    const uint4* __restrict__ w, const unsigned short* __restrict__ scales, const unsigned char* __restrict__ zeros,
    const unsigned short* __restrict__ x, unsigned short* __restrict__ y, int M, int N, int K) {
  __shared__ float red[WARPS][RT * 16][8 * MB + 1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile0 = blockIdx.x * RT, groups = K / 128;
  float acc[RT][MB][4];
  #pragma unroll
  for (int r = 0; r < RT; r++)
    for (int m = 0; m < MB; m++) for (int i = 0; i < 4; i++) acc[r][m][i] = 0.f;
  Words nw[DEPTH][RT]; uint4 nx[MB][4];
  unsigned short ns[AHEAD ? DEPTH : 1][RT][2][8 / GT]; unsigned char nz[AHEAD ? DEPTH : 1][RT][2][8 / GT];
  auto load_scales = [&](int group, int d) {
    #pragma unroll
    for (int r = 0; r < RT; r++)
      for (int h = 0; h < 2; h++)
        for (int q = 0; q < 8 / GT; q++) {
          size_t at = (size_t)(group * (8 / GT) + q) * N + (tile0 + r) * 16 + 8 * h + g;
          ns[d][r][h][q] = scales[at];
#if HAS_ZERO
          nz[d][r][h][q] = zeros[at];
#endif
        }
  };
  auto load_words = [&](int group, int d) {
    #pragma unroll
    for (int r = 0; r < RT; r++) nw[d][r] = words_at(w + ((size_t)(tile0 + r) * groups + group) * BLOCK_VECTORS, lane);
    if (AHEAD) load_scales(group, d);
  };
  auto load_x = [&](int group) {
    #pragma unroll
    for (int m = 0; m < MB; m++)
      #pragma unroll
      for (int c = 0; c < 4; c++)
        nx[m][c] = (m * 8 + g < M) ? fresh(x + (size_t)(m * 8 + g) * K + group * 128 + 32 * c + 8 * t) : make_uint4(0, 0, 0, 0);
  };
  #pragma unroll
  for (int d = 0; d < DEPTH; d++) if (warp + d * WARPS < groups) load_words(warp + d * WARPS, d);
  // Words and scales are being loaded while the program that computes x still runs. Only from here on x may be read. The
  // program after this one may start now; it waits in the same way.
  let_next_start();
  wait_for_last();
  if (warp < groups) load_x(warp);
  for (int first = warp; first < groups; first += DEPTH * WARPS)
  #pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    const int group = first + d * WARPS;
    if (group >= groups) break;
    Words cw[RT]; uint4 cx[MB][4];
    #pragma unroll
    for (int r = 0; r < RT; r++) cw[r] = nw[d][r];
    #pragma unroll
    for (int m = 0; m < MB; m++) for (int c = 0; c < 4; c++) cx[m][c] = nx[m][c];
    unsigned short sc[RT][2][8 / GT]; unsigned char zp[RT][2][8 / GT];
    if (!AHEAD) load_scales(group, 0);
    #pragma unroll
    for (int r = 0; r < RT; r++)
      for (int h = 0; h < 2; h++)
        for (int q = 0; q < 8 / GT; q++) { sc[r][h][q] = ns[AHEAD ? d : 0][r][h][q]; zp[r][h][q] = nz[AHEAD ? d : 0][r][h][q]; }
    if (group + DEPTH * WARPS < groups) load_words(group + DEPTH * WARPS, d);
    if (group + WARPS < groups) load_x(group + WARPS);
    float tmp[RT][MB][4], sx[MB][4];
#if BITS == 8
    float top[RT][MB][4];
#endif
    #pragma unroll
    for (int j = 0; j < 8; j++) {
      if (j % GT == 0) {
        #pragma unroll
        for (int m = 0; m < MB; m++) for (int i = 0; i < 4; i++) { sx[m][i] = 0.f; for (int r = 0; r < RT; r++) tmp[r][m][i] = 0.f; }
#if BITS == 8
        #pragma unroll
        for (int r = 0; r < RT; r++) for (int m = 0; m < MB; m++) for (int i = 0; i < 4; i++) top[r][m][i] = 0.f;
#endif
      }
      #pragma unroll
      for (int m = 0; m < MB; m++) {
        uint4 v = cx[m][j >> 1];
        mma(sx[m], ONES, ONES, ONES, ONES, j & 1 ? v.z : v.x, j & 1 ? v.w : v.y);
      }
      #pragma unroll
      for (int r = 0; r < RT; r++) {
        u32 a0 = lower(cw[r], j, 0), a1 = lower(cw[r], j, 1), a2 = lower(cw[r], j, 2), a3 = lower(cw[r], j, 3);
        #pragma unroll
        for (int m = 0; m < MB; m++) { uint4 v = cx[m][j >> 1]; mma(tmp[r][m], a0, a1, a2, a3, j & 1 ? v.z : v.x, j & 1 ? v.w : v.y); }
#if BITS == 8
        a0 = upper(cw[r], j, 0), a1 = upper(cw[r], j, 1), a2 = upper(cw[r], j, 2), a3 = upper(cw[r], j, 3);
        #pragma unroll
        for (int m = 0; m < MB; m++) { uint4 v = cx[m][j >> 1]; mma(top[r][m], a0, a1, a2, a3, j & 1 ? v.z : v.x, j & 1 ? v.w : v.y); }
#endif
      }
      if (j % GT == GT - 1) {
        #pragma unroll
        for (int r = 0; r < RT; r++)
          for (int h = 0; h < 2; h++) {
            float s = to_float(sc[r][h][j / GT]) * (1.f / FACTOR(h));
#if HAS_ZERO
            float off = (float)zp[r][h][j / GT];
#else
            float off = (float)MIDDLE;
#endif
            for (int m = 0; m < MB; m++)
              for (int i = 0; i < 2; i++) {
#if BITS == 8
                float sum = tmp[r][m][2 * h + i] + 16.f * top[r][m][2 * h + i] - (17.f * BASE + off) * sx[m][2 * h + i];
#else
                float sum = tmp[r][m][2 * h + i] - (BASE + FACTOR(h) * off) * sx[m][2 * h + i];
#endif
                acc[r][m][2 * h + i] += s * sum;
              }
          }
      }
    }
  }
  #pragma unroll
  for (int r = 0; r < RT; r++)
    for (int m = 0; m < MB; m++)
      for (int i = 0; i < 4; i++) red[warp][r * 16 + g + 8 * (i >> 1)][m * 8 + 2 * t + (i & 1)] = acc[r][m][i];
  __syncthreads();
  for (int e = threadIdx.x; e < RT * 16 * 8 * MB; e += WARPS * 32) {
    int n = e % (RT * 16), m = e / (RT * 16);
    if (m >= M) break;
    float s = 0.f;
    #pragma unroll
    for (int k = 0; k < WARPS; k++) s += red[k][n][m];
    y[(size_t)m * N + tile0 * 16 + n] = from_float(s);
  }
}

#elif KERNEL == SOME_ROWS
// Some rows: every warp has its own outputs, and the warps share x through shared memory. The weight is unpacked once and
// used for all rows of the block. blockIdx.y splits K into parts, which `sum_parts` adds up.
// RT: tiles of 16 outputs of a warp. MB: multiples of 8 rows of x in a block. WARPS.
// A row of x in shared memory: 256 bytes and 64 unused ones, so that two neighbouring rows, which the 8 lanes of a 16-byte
// load read, are in different banks.
#define STRIDE 320
extern "C" __global__ void __launch_bounds__(WARPS * 32) some_rows(
    const uint4* __restrict__ w, const unsigned short* __restrict__ scales, const unsigned char* __restrict__ zeros,
    const unsigned short* __restrict__ x, float* __restrict__ y, int M, int N, int K) {
  __shared__ __align__(16) unsigned char xs[2][8 * MB * STRIDE];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int tile0 = (blockIdx.x * WARPS + warp) * RT, groups = K / 128, per = (groups + gridDim.y - 1) / gridDim.y;
  const int first = blockIdx.y * per, last = min(groups, first + per), m0 = blockIdx.z * 8 * MB;
  float acc[RT][MB][4];
  #pragma unroll
  for (int r = 0; r < RT; r++)
    for (int m = 0; m < MB; m++) for (int i = 0; i < 4; i++) acc[r][m][i] = 0.f;
  Words nw[RT];
  auto words = [&](int group) {
    #pragma unroll
    for (int r = 0; r < RT; r++) nw[r] = words_at(w + ((size_t)(tile0 + r) * groups + group) * BLOCK_VECTORS, lane);
  };
  auto stage = [&](int group, int slot) {
    for (int e = threadIdx.x; e < 8 * MB * 16; e += WARPS * 32) {
      int m = e >> 4, c = e & 15;
      u32 to = (u32)__cvta_generic_to_shared(&xs[slot][m * STRIDE + (c << 4)]);
      const unsigned short* from = x + (size_t)min(m0 + m, M - 1) * K + group * 128 + 8 * c;
      int n = m0 + m < M ? 16 : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(n));
    }
    asm volatile("cp.async.commit_group;");
  };
  if (first < last) words(first);
  let_next_start();
  wait_for_last();
  if (first < last) stage(first, 0);
  for (int group = first; group < last; group++) {
    const int slot = (group - first) & 1;
    Words cw[RT];
    #pragma unroll
    for (int r = 0; r < RT; r++) cw[r] = nw[r];
    u32 sc[RT][2][8 / GT], zo[RT][2][8 / GT];
    #pragma unroll
    for (int r = 0; r < RT; r++)
      for (int h = 0; h < 2; h++)
        for (int q = 0; q < 8 / GT; q++) {
          size_t at = (size_t)(group * (8 / GT) + q) * N + (tile0 + r) * 16 + 8 * h + g;
          u32 s = scales[at]; sc[r][h][q] = s | (s << 16);
#if HAS_ZERO
          zo[r][h][q] = zero_pair(zeros[at], h);
#else
          zo[r][h][q] = zero_pair(MIDDLE, h);
#endif
        }
    asm volatile("cp.async.wait_group 0;");
    __syncthreads();
    if (group + 1 < last) { stage(group + 1, slot ^ 1); words(group + 1); }
    #pragma unroll
    for (int c = 0; c < 4; c++) {
      u32 a[RT][2][4];
      #pragma unroll
      for (int r = 0; r < RT; r++)
        for (int e = 0; e < 2; e++)
          #pragma unroll
          for (int i = 0; i < 4; i++)
            a[r][e][i] = value(cw[r], 2 * c + e, i, zo[r][i & 1][(2 * c + e) / GT], sc[r][i & 1][(2 * c + e) / GT]);
      #pragma unroll
      for (int m = 0; m < MB; m++) {
        uint4 v = *(const uint4*)&xs[slot][(m * 8 + g) * STRIDE + 64 * c + 16 * t];
        #pragma unroll
        for (int r = 0; r < RT; r++) {
          mma(acc[r][m], a[r][0][0], a[r][0][1], a[r][0][2], a[r][0][3], v.x, v.y);
          mma(acc[r][m], a[r][1][0], a[r][1][1], a[r][1][2], a[r][1][3], v.z, v.w);
        }
      }
    }
  }
  #pragma unroll
  for (int r = 0; r < RT; r++)
    for (int m = 0; m < MB; m++)
      for (int i = 0; i < 4; i++) {
        int row = m0 + m * 8 + 2 * t + (i & 1), n = (tile0 + r) * 16 + g + 8 * (i >> 1);
        if (row < M) y[((size_t)blockIdx.y * M + row) * N + n] = acc[r][m][i];
      }
}

#elif KERNEL == DEQUANTIZE
// The weight in 16 bits, (N, K), for the dense product of very many rows.
extern "C" __global__ void __launch_bounds__(WARPS * 32) dequantize(
    const uint4* __restrict__ w, const unsigned short* __restrict__ scales, const unsigned char* __restrict__ zeros,
    unsigned short* __restrict__ out, int N, int K) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, groups = K / 128;
  const int group = blockIdx.x * WARPS + warp, tile = blockIdx.y;
  if (group >= groups) return;
  const Words v = words_at(w + ((size_t)tile * groups + group) * BLOCK_VECTORS, lane);
  let_next_start();
  wait_for_last();
  #pragma unroll
  for (int c = 0; c < 4; c++) {
    u32 a[2][4];
    #pragma unroll
    for (int e = 0; e < 2; e++)
      #pragma unroll
      for (int i = 0; i < 4; i++) {
        size_t at = (size_t)(group * (8 / GT) + (2 * c + e) / GT) * N + tile * 16 + 8 * (i & 1) + g;
        u32 s = scales[at]; s |= s << 16;
#if HAS_ZERO
        u32 z = zero_pair(zeros[at], i & 1);
#else
        u32 z = zero_pair(MIDDLE, i & 1);
#endif
        a[e][i] = value(v, 2 * c + e, i, z, s);
      }
    #pragma unroll
    for (int h = 0; h < 2; h++)
      *(uint4*)(out + (size_t)(tile * 16 + 8 * h + g) * K + group * 128 + 32 * c + 8 * t) = make_uint4(a[0][h], a[0][2 + h], a[1][h], a[1][2 + h]);
  }
}
#elif KERNEL == REORDER
// x with every 32 k in the order in which lanes have them: first the 8 k of lane 0, then those of lane 1, ...
extern "C" __global__ void reorder(const u32* x, uint4* out, int count) {
  let_next_start();
  wait_for_last();
  const int e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e >= count) return;
  const u32* from = x + (size_t)(e >> 2) * 16 + (e & 3);
  out[e] = make_uint4(from[0], from[4], from[8], from[12]);
}
#elif KERNEL == SUM_PARTS
// The parts of a product whose K was split, (parts, count), added up in a fixed order, so that runs repeat bit by bit.
extern "C" __global__ void sum_parts(const float* from, unsigned short* y, int parts, int count) {
  let_next_start();
  wait_for_last();
  int e = blockIdx.x * blockDim.x + threadIdx.x;
  if (e >= count) return;
  float s = 0.f;
  for (int p = 0; p < parts; p++) s += from[(size_t)p * count + e];
  y[e] = from_float(s);
}
#elif KERNEL == MANY_ROWS || KERNEL == SUM_SPANS
// Many rows: warpgroup products (wgmma) with the weight unpacked in registers and x in shared memory.
// BM: rows of x in a tile of y, in PIECES: an instruction takes at most 256 rows, and one unpacked weight serves two
// pieces. WG: warpgroups, each with R times 64 outputs of the tile. STG: stages, the chunks that are in shared memory.
// One warp copies x into shared memory, in chunks of 64 k; the others unpack the next words while products run. STAGED: the
// copying warp also copies words, scales and zero points, many chunks ahead. Otherwise each computing warp loads its own,
// one chunk ahead, which is faster as long as the GPU's memory limits the time and not the products.
// NATURAL: x has its own order, and words come from shared memory by `ldmatrix`, which hands lane t of the four lanes of an
// output word t of each of them: two neighbours of every 8 k. Otherwise `reorder` has changed x, and lanes take their own
// words.
//
// Tiles are given to blocks in `waves`, in which every block has one whole tile. Fewer tiles than blocks remain, the
// `rest`. For them K of all tiles is laid end to end and cut into spans, at most one for each block. A span reaches into at
// most two tiles. Its sums for each tile go to `parts`, as lanes hold them, and `sum_spans` adds those of a tile.
#define BN (WG * R * 64)
struct Work {
  int blocks, waves, rest, spans, groups;  // groups: of 128 k, in a tile
  __device__ __forceinline__ int begin(int span) const { return (long long)rest * groups * min(span, spans) / max(spans, 1); }
};
// Writes 8 rows of y and 16 outputs, from m and n on, from sums in the order in which a product leaves them in lanes.
__device__ __forceinline__ void store(unsigned short* y, const float* sums, int m, int n, int M, int N, int lane) {
  #pragma unroll
  for (int h = 0; h < 2; h++) {
    u32 pair = from_float(sums[2 * h]) | ((u32)from_float(sums[2 * h + 1]) << 16), turned;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    const int row = m + (lane >> 2);
    if (row < M) *(u32*)(y + (size_t)row * N + n + 8 * h + 2 * (lane & 3)) = turned;
  }
}
// The first output in the tile of a computing thread's sums for the r-th 64 outputs; and the place of its i-th sum in
// `parts`, where the sums of all threads are next to each other.
__device__ __forceinline__ int output_of(int thread, int r) { return (thread >> 7) * R * 64 + r * 64 + ((thread >> 5) & 3) * 16; }
__device__ __forceinline__ size_t part_at(int part, int r, int i, int thread) {
  return (((size_t)part * R + r) * (BM / 2) + i) * (WG * 128) + thread;
}
#if KERNEL == SUM_SPANS
// blockIdx.x: which 8 rows, and which of the R times 64 outputs; blockIdx.y: which tile of the rest.
extern "C" __global__ void __launch_bounds__(WG * 128) sum_spans(
    const float* parts, unsigned short* y, int M, int N, int down, Work work) {
  let_next_start();
  wait_for_last();
  const int q = blockIdx.x % (BM / 8), r = blockIdx.x / (BM / 8), begin = blockIdx.y * work.groups, end = begin + work.groups;
  int span = (long long)begin * work.spans / (work.rest * work.groups);
  while (work.begin(span + 1) <= begin) span++;
  float sums[4] = {0.f, 0.f, 0.f, 0.f};
  for (; span < work.spans && work.begin(span) < end; span++) {
    const int part = 2 * span + (work.begin(span) < begin);
    #pragma unroll
    for (int i = 0; i < 4; i++) sums[i] += parts[part_at(part, r, 4 * q + i, threadIdx.x)];
  }
  const int tile = work.waves * work.blocks + blockIdx.y;
  store(y, sums, tile % down * BM + 8 * q, tile / down * BN + output_of(threadIdx.x, r), M, N, threadIdx.x & 31);
}
#else
#define PIECE (BM / PIECES)
#define STEP (BM <= 352 ? 4 : 1)  // times 16 k that are unpacked at once: the sums of more rows leave few registers
#define QS (GT >= 4 ? 1 : 4 / GT)
#define UNROLL (R == 1 && STEP == 4 || BITS < 4 ? 2 : 1)
#define X_BYTES (BM * 128)
#define TILE_BYTES (BITS == 8 ? 1024 : BITS == 3 ? 768 : 512)  // of 16 outputs: 64 k, but 128 k of 2 and 3 bits
#define SCALES_AT (X_BYTES + BN / 16 * TILE_BYTES)
#define ZEROS_AT (SCALES_AT + QS * BN * 2)
#define STAGE_BYTES (STAGED ? ZEROS_AT + HAS_ZERO * QS * BN : X_BYTES)
#define STAGE ((STAGE_BYTES + 1023) / 1024 * 1024)
@WGMMA@
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: }" :: "r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void copy(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
struct __align__(64) Map { unsigned long long opaque[16]; };  // of x, for the unit that copies tiles of it
__device__ __forceinline__ void copy_tile(u32 to, const Map& map, int k, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :: "r"(to), "l"(&map), "r"(k), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ uint4 shared_vector(u32 at, int lane) {
  uint4 v;
#if NATURAL
  at += 16 * place_of(4 * (lane & 7) + (lane >> 3));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
#else
  at += 16 * place_of(lane);
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
#endif
  return v;
}
__device__ __forceinline__ u32 shared_half(u32 at) { unsigned short v; asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at)); return v; }
__device__ __forceinline__ u32 shared_byte(u32 at) { u32 v; asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(at)); return v; }
// The part of `words_at` that tiles 4 half to 4 half + 3 need, from shared memory or from the block. With 4 and 8 bits it
// is put where tiles 0 to 3 have their words.
__device__ __forceinline__ Words half_of_words(const uint4* block, u32 at, int lane, int half) {
  Words w;
#if STAGED
  put(w, 0, shared_vector(at, lane));
  if (BITS == 8) put(w, BITS, shared_vector(at + 512, lane));
#if BITS == 3
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(w.at[4]), "=r"(w.at[5]) : "r"(at + 512 + 8 * place_of(lane)));
#endif
#elif BITS == 3
  w = words_at(block, lane);
#else
  put(w, 0, stream(block + (BITS >= 4 ? 32 * half : 0) + place_of(lane)));
  if (BITS == 8) put(w, BITS, stream(block + 64 + 32 * half + place_of(lane)));
#endif
  return w;
}
__device__ __forceinline__ size_t scale_of(int chunk, int q, int N) { return (size_t)(GT == 8 ? chunk >> 1 : chunk * QS + q) * N; }
struct Place { int slot; u32 turn; __device__ __forceinline__ void next() { if (++slot == STG) { slot = 0; turn ^= 1; } } };
// Calls `each` for every tile of this block, with its number, its first and last chunk of 64 k, and the number of its part
// in `parts`, or -1 if the block computes the whole tile.
template <class F> __device__ __forceinline__ void for_each_tile(const Work& work, F each) {
  const int block = blockIdx.x, end = work.begin(block + 1);
  int at = work.begin(block), next = 2 * block;
  for (int wave = 0; wave < work.waves || at < end; wave++) {
    int tile = wave * work.blocks + block, first = 0, last = work.groups, part = -1;
    if (wave >= work.waves) {
      tile = work.waves * work.blocks + at / work.groups;
      first = at % work.groups;
      last = min(work.groups, first + end - at);
      at += last - first;
      part = next++;
    }
    each(tile, 2 * first, 2 * last, part);
  }
}
extern "C" __global__ void __launch_bounds__(WG * 128 + (WG > 1 ? 128 : 32), 1) many_rows(
    const uint4* __restrict__ w, const unsigned short* __restrict__ scales, const unsigned char* __restrict__ zeros,
    const __grid_constant__ Map x, unsigned short* __restrict__ y, float* __restrict__ parts, int M, int N, int down,
    const Work work) {
  extern __shared__ unsigned char raw[];
  __shared__ __align__(8) unsigned long long barriers[2 * STG];
  const u32 base = ((u32)__cvta_generic_to_shared(raw) + 1023u) & ~1023u, full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STG;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, tiles = (M + BM - 1) / BM * (N / BN);
  let_next_start();
  if (threadIdx.x == 0) {
    for (int s = 0; s < STG; s++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(full + 8 * s), "r"(1));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + 8 * s), "r"(WG * 4));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (warp >= WG * 4) {  // the copying warp; it gives up registers, which the computing warps take below
#if WG > 1
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
#endif
    if (warp > WG * 4) return;
    Place place{0, 1};  // the first wait for every slot passes
    wait_for_last();  // the other warps write nothing before x has come
    for_each_tile(work, [&](int tile, int first, int last, int) {
      if (tile >= tiles) return;
      const int row = tile % down * BM, across = tile / down;
      for (int chunk = first; chunk < last; chunk++, place.next()) {
        const u32 at = base + place.slot * STAGE, done = full + 8 * place.slot;
        wait(empty + 8 * place.slot, place.turn);
        if (lane == 0) {
          asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(done), "r"(STAGE_BYTES) : "memory");
          for (int p = 0; p < PIECES; p++) copy_tile(at + p * PIECE * 128, x, chunk * 64, row + p * PIECE, done);
        }
#if STAGED
        __syncwarp();
        for (int i = lane; i < BN / 16; i += 32) {
          const uint4* block = w + ((size_t)(across * (BN / 16) + i) * work.groups + chunk / 2) * BLOCK_VECTORS;
          const u32 to = at + X_BYTES + TILE_BYTES * i;
          copy(to, block + (BITS >= 4 ? 32 * (chunk & 1) : 0), BITS == 8 ? 512 : TILE_BYTES, done);
          if (BITS == 8) copy(to + 512, block + 64 + 32 * (chunk & 1), 512, done);
        }
        if (lane < QS) {
          const size_t from = scale_of(chunk, lane, N) + across * BN;
          copy(at + SCALES_AT + lane * BN * 2, scales + from, BN * 2, done);
          if (HAS_ZERO) copy(at + ZEROS_AT + lane * BN, zeros + from, BN, done);
        }
#endif
      }
    });
    return;
  }
#if WG == 2
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
#elif WG == 3
  asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
#elif WG == 4
  asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
#endif
  const int local = (warp >> 2) * 4 * R + (warp & 3);  // of 16 outputs in a tile; and + 4 r
  Place place{0, 0};
  for_each_tile(work, [&](int tile, int first, int last, int part) {
  if (tile >= tiles) return;
  const int across = tile / down;
  float acc[R][BM / 2];
  #pragma unroll
  for (int r = 0; r < R; r++) for (int i = 0; i < BM / 2; i++) acc[r][i] = 0.f;
  u32 before = 0;  // the barrier of the chunk before, whose products may still run
#if !STAGED
  Words nw[R]; unsigned short ns[R][2][QS]; unsigned char nz[R][2][QS];
  auto fetch = [&](int chunk, int half) {
    #pragma unroll
    for (int r = 0; r < R; r++) {
      const int strip = across * (BN / 16) + local + 4 * r;
      nw[r] = half_of_words(w + ((size_t)strip * work.groups + chunk / 2) * BLOCK_VECTORS, 0, lane, half);
      #pragma unroll
      for (int h = 0; h < 2; h++)
        for (int q = 0; q < QS; q++) {
          const size_t from = scale_of(chunk, q, N) + strip * 16 + 8 * h + g;
          ns[r][h][q] = scales[from];
          if (HAS_ZERO) nz[r][h][q] = zeros[from];
        }
    }
  };
  fetch(first, 0);
#endif
  for (int chunk0 = first; chunk0 < last; chunk0 += UNROLL) {
    #pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const int chunk = chunk0 + u, half = UNROLL == 2 ? u : chunk & 1;
      const u32 at = base + place.slot * STAGE;
      // wgmma's description of x in shared memory: address / 16, 1024 bytes from 8 rows to the next 8, 128-byte swizzle. A
      // step of 16 k adds 32 bytes, which are 2 units; a row has 128 bytes, which are 8.
      const unsigned long long desc = ((unsigned long long)(at >> 4) & 0x3FFFull) | (1ull << 16) | (64ull << 32) | (1ull << 62);
#if STAGED
      wait(full + 8 * place.slot, place.turn);
#else
      Words ow[R]; unsigned short os[R][2][QS]; unsigned char oz[R][2][QS];
      #pragma unroll
      for (int r = 0; r < R; r++) {
        ow[r] = nw[r];
        for (int h = 0; h < 2; h++) for (int q = 0; q < QS; q++) { os[r][h][q] = ns[r][h][q]; oz[r][h][q] = nz[r][h][q]; }
      }
      if (chunk + 1 < last) fetch(chunk + 1, 1 - half);
#endif
      #pragma unroll
      for (int r = 0; r < R; r++) {
#if STAGED
        const Words cw = half_of_words(w, at + X_BYTES + (local + 4 * r) * TILE_BYTES, lane, half);
#else
        const Words cw = ow[r];
#endif
        u32 cs[2][QS], cz[2][QS];
        #pragma unroll
        for (int h = 0; h < 2; h++) for (int q = 0; q < QS; q++) {
#if STAGED
          const u32 n = (local + 4 * r) * 16 + 8 * h + g + q * BN;
          const u32 s = shared_half(at + SCALES_AT + 2 * n), z = HAS_ZERO ? shared_byte(at + ZEROS_AT + n) : MIDDLE;
#else
          const u32 s = os[r][h][q], z = HAS_ZERO ? oz[r][h][q] : MIDDLE;
#endif
          cs[h][q] = s | (s << 16);
          cz[h][q] = zero_pair(z, h);
        }
        #pragma unroll
        for (int k = 0; k < 4; k += STEP) {
          u32 a[STEP][4];
          #pragma unroll
          for (int j = 0; j < STEP; j++)
            #pragma unroll
            for (int i = 0; i < 4; i++) {
              const int q = (k + j) * QS / 4;
              a[j][i] = value(cw, (BITS < 4 ? 4 * half : 0) + k + j, i, cz[i & 1][q], cs[i & 1][q]);
            }
          if (!STAGED && r == 0 && k == 0) wait(full + 8 * place.slot, place.turn);
          asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
          #pragma unroll
          for (int j = 0; j < STEP; j++)
            #pragma unroll
            for (int p = 0; p < PIECES; p++) wgmma(acc[r] + p * PIECE / 2, a[j], desc + 2 * (k + j) + p * PIECE * 8);
          asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
          asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
          if (r == 0 && k == 0 && before && lane == 0) arrive(before);  // the products of the chunk before are done
        }
      }
      before = empty + 8 * place.slot;
      place.next();
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  if (lane == 0) arrive(before);
  #pragma unroll
  for (int r = 0; r < R; r++)
    #pragma unroll
    for (int q = 0; q < BM / 8; q++) {
      if (part < 0) store(y, acc[r] + 4 * q, tile % down * BM + 8 * q, across * BN + output_of(threadIdx.x, r), M, N, lane);
      else for (int i = 4 * q; i < 4 * q + 4; i++) parts[part_at(part, r, i, threadIdx.x)] = acc[r][i];
    }
  });
}
#endif
#endif
