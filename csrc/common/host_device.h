// SK_HOST_DEVICE marks the rules of an op that its CPU and its CUDA kernel share.
#pragma once

#if defined(__CUDACC__)
#define SK_HOST_DEVICE __host__ __device__
#else
#define SK_HOST_DEVICE
#endif
