#pragma once

#include <hdf5.h>

#include <mutex>
#include <utility>

namespace tessera::formats::native::h5 {

/// Locks the HDF5 library as long as the scope lives, because the library may not be thread-safe.
/// Also stops the library from printing errors, because Tessera reports them. One thread may nest
/// scopes. Throws std::bad_alloc if memory is limited and little is left: the library (1.10.8)
/// corrupts the heap or uses null pointers if an allocation fails inside it.
class LibraryScope {
 public:
  LibraryScope();
  ~LibraryScope();
  LibraryScope(const LibraryScope&) = delete;
  LibraryScope& operator=(const LibraryScope&) = delete;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  H5E_auto2_t report_ = nullptr;
  void* report_data_ = nullptr;
};

/// Owns one HDF5 object of any kind, or none. Move-only. Ignores errors of closing, which is right
/// for every object except a file that was written (see `close_file`). If little memory is left,
/// the object stays open.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);

  Handle() = default;
  Handle(hid_t id, Close close) : id_(id), close_(close) {}
  ~Handle() { reset(); }
  Handle(Handle&& other) noexcept
      : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(other.close_) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  hid_t id() const { return id_; }
  explicit operator bool() const { return id_ >= 0; }
  hid_t release() { return std::exchange(id_, H5I_INVALID_HID); }
  void reset();

 private:
  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

}  // namespace tessera::formats::native::h5
