// Sixteen bytes of a tensor's row as one thread holds them: elements of 1, 2 or 4 bytes, moved in
// one piece where alignment allows it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/device.cuh"

namespace spec_kernels {

struct alignas(16) Packet {
  uint32_t words[4];
};

template <class T>
constexpr int kPerPacket = static_cast<int>(sizeof(Packet) / sizeof(T));

__device__ inline Packet filled(uint32_t word) { return {{word, word, word, word}}; }

template <class T>
__device__ inline float to_f32(uint32_t bits);
template <>
__device__ inline float to_f32<float>(uint32_t bits) {
  return __uint_as_float(bits);
}
template <>
__device__ inline float to_f32<__nv_bfloat16>(uint32_t bits) {
  return __uint_as_float(bits << 16);
}
template <>
__device__ inline float to_f32<__half>(uint32_t bits) {
  const uint16_t low = static_cast<uint16_t>(bits);
  __half v;
  memcpy(&v, &low, sizeof(v));
  return __half2float(v);
}

// Rounded to nearest even.
template <class T>
__device__ inline uint32_t to_bits(float v);
template <>
__device__ inline uint32_t to_bits<float>(float v) {
  return __float_as_uint(v);
}
template <>
__device__ inline uint32_t to_bits<__nv_bfloat16>(float v) {
  const __nv_bfloat16 rounded = __float2bfloat16_rn(v);
  uint16_t bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}
template <>
__device__ inline uint32_t to_bits<__half>(float v) {
  const __half rounded = __float2half_rn(v);
  uint16_t bits;
  memcpy(&bits, &rounded, sizeof(bits));
  return bits;
}

// The bits of element i of a packet; a register where i is known when this is compiled.
template <class T>
__device__ inline uint32_t element(const Packet& packet, int i) {
  constexpr int kBits = 8 * static_cast<int>(sizeof(T)), kPerWord = 32 / kBits;
  return packet.words[i / kPerWord] >> i % kPerWord * kBits & (0xffffffffu >> (32 - kBits));
}

template <class T>
__device__ inline Packet pack(const float (&values)[kPerPacket<T>]) {
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  Packet packet = filled(0);
#pragma unroll
  for (int i = 0; i < kPerPacket<T>; ++i)
    packet.words[i / kPerWord] |= to_bits<T>(values[i]) << i % kPerWord * (32 / kPerWord);
  return packet;
}

template <class T>
using BitsOf = std::conditional_t<sizeof(T) == 1, uint8_t,
                                  std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>;

// The first `num` elements from `from` on, zeros after them. `aligned`: a full packet may be read
// in one piece.
template <class T>
__device__ inline Packet load_elements(const T* from, int num, bool aligned) {
  if (aligned && num == kPerPacket<T>) return *reinterpret_cast<const Packet*>(from);
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  Packet packet = filled(0);
#pragma unroll
  for (int i = 0; i < kPerPacket<T>; ++i) {
    const uint32_t bits = i < num ? reinterpret_cast<const BitsOf<T>*>(from)[i] : 0;
    packet.words[i / kPerWord] |= bits << i % kPerWord * (32 / kPerWord);
  }
  return packet;
}

template <class T>
__device__ inline void store_elements(T* to, int num, bool aligned, const Packet& packet) {
  if (aligned && num == kPerPacket<T>) {
    *reinterpret_cast<Packet*>(to) = packet;
    return;
  }
#pragma unroll
  for (int i = 0; i < kPerPacket<T>; ++i) {
    if (i < num)
      reinterpret_cast<BitsOf<T>*>(to)[i] = static_cast<BitsOf<T>>(element<T>(packet, i));
  }
}

}  // namespace spec_kernels
