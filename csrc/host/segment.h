// An anonymous shared segment: a sealed memfd with its pages allocated, mapped here, gone with the
// last process.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "pcie_allreduce/group.h"

namespace spec_kernels {

// Holds one robust futex word for as long as this process lives, in a thread of its own: a robust
// futex dies with its thread, and the thread that binds a rank may end long before the rank does.
class LifeHolder {
 public:
  explicit LifeHolder(std::atomic<uint32_t>* word);
  ~LifeHolder();

  LifeHolder(const LifeHolder&) = delete;
  LifeHolder& operator=(const LifeHolder&) = delete;

 private:
  void hold(std::atomic<uint32_t>* word);

  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
  bool leave_ = false;
  int error_ = 0;
  std::thread thread_;
};

class Segment {
 public:
  static std::unique_ptr<Segment> create(uint32_t world_size, uint64_t capacity,
                                         const group::Policy& policy);
  // Opens descriptor `fd` of process `pid` (same user), and refuses anything that is not the
  // segment named `id`.
  static std::unique_ptr<Segment> attach(int64_t pid, int64_t fd, const std::string& id);
  ~Segment();

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Takes the place of `rank` for this process until leave() or its end.
  void bind(int64_t rank);
  void leave();
  void abort(int64_t rank, const std::string& reason);

  int fd() const { return fd_; }
  uint64_t size() const { return size_; }
  void* data() const { return data_; }
  group::Header& header() const { return *static_cast<group::Header*>(data_); }

 private:
  Segment(int fd, uint64_t size);

  int fd_ = -1;
  uint64_t size_ = 0;
  void* data_ = nullptr;
  int64_t rank_ = -1;
  int64_t owner_pid_ = 0;
  LifeHolder* holder_ = nullptr;
};

}  // namespace spec_kernels
