#include "formats/torch_zip/strided_read.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tessera::formats::torch_zip {
namespace {

constexpr std::int64_t kStagingNbytes = std::int64_t{1} << 20;
constexpr std::int64_t kGapNbytes = std::int64_t{16}
                                    << 10;  // a gap up to this size is cheaper to read than to skip

/// One dimension of a box, in elements of the storage and of `out`.
struct Dim {
  std::int64_t size;
  std::int64_t stride;
  std::int64_t out_stride;
};

class StridedRead {
 public:
  StridedRead(std::int64_t element_nbytes, std::span<std::byte> out, const StorageRead& read)
      : element_nbytes_(element_nbytes), out_(out), read_(read) {}

  /// Reads a box. `source` and `target` are the places of its first element in the storage and in
  /// `out`.
  void read_box(std::vector<Dim> dims, std::int64_t source, std::int64_t target) {
    std::erase_if(dims, [](const Dim& dim) { return dim.size == 1; });
    std::sort(dims.begin(), dims.end(), [](const Dim& a, const Dim& b) {
      return a.stride != b.stride ? a.stride > b.stride : a.out_stride > b.out_stride;
    });
    std::vector<Dim> merged;
    for (const Dim& dim : dims) {
      if (!merged.empty() && merged.back().stride == dim.stride * dim.size &&
          merged.back().out_stride == dim.out_stride * dim.size) {
        merged.back() = {merged.back().size * dim.size, dim.stride, dim.out_stride};
      } else {
        merged.push_back(dim);
      }
    }
    gather(merged, source, target);
  }

 private:
  static std::int64_t span_of(std::span<const Dim> dims) {
    std::int64_t span = 1;
    for (const Dim& dim : dims) span += (dim.size - 1) * dim.stride;
    return span;
  }

  static bool is_run(std::span<const Dim> dims) {
    return dims.empty() ||
           (dims.size() == 1 && dims.front().stride == 1 && dims.front().out_stride == 1);
  }

  static std::int64_t gap_after_each(std::span<const Dim> dims) {
    return dims.front().stride - span_of(dims.subspan(1));
  }
  bool is_far(std::int64_t gap) const { return gap * element_nbytes_ > kGapNbytes; }

  /// Says whether to read all bytes from the first to the last element of `dims` in one call: if
  /// these bytes are few, and the gaps between elements are small.
  bool is_stretch(std::span<const Dim> dims) const {
    if (span_of(dims) > kStagingNbytes / element_nbytes_) return false;
    for (; !dims.empty(); dims = dims.subspan(1)) {
      if (is_far(gap_after_each(dims))) return false;
    }
    return true;
  }

  // Loops over the outer dims until the inner ones are a run (adjacent elements) or a stretch
  // (short enough to read with its gaps). A run is read directly into `out`. Stretches are read
  // into `staging_`, as many as have room, and then copied. Requires: strides do not increase.
  void gather(std::span<const Dim> dims, std::int64_t source, std::int64_t target) {
    if (is_run(dims)) return read_(bytes_at(source), out_at(target, span_of(dims)));
    const Dim& outer = dims.front();
    const std::span<const Dim> inner = dims.subspan(1);
    const bool far = is_far(gap_after_each(dims));
    if (!is_stretch(inner) || (far && is_run(inner) && !inner.empty())) {
      for (std::int64_t i = 0; i < outer.size; ++i) {
        gather(inner, source + i * outer.stride, target + i * outer.out_stride);
      }
      return;
    }
    const std::int64_t stretch = span_of(inner);
    const std::int64_t spacing = far ? stretch : outer.stride;  // between stretches in staging_
    const std::int64_t room = kStagingNbytes / element_nbytes_ - stretch;
    const std::int64_t num_staged =
        spacing == 0 ? outer.size : std::min(outer.size, 1 + room / spacing);
    std::vector<Dim> staged(dims.begin(), dims.end());
    staged.front().stride = spacing;
    for (std::int64_t i = 0; i < outer.size; i += num_staged) {
      staged.front().size = std::min(num_staged, outer.size - i);
      const std::int64_t begin = source + i * outer.stride;
      if (far) {
        for (std::int64_t k = 0; k < staged.front().size; ++k) {
          read_(bytes_at(begin + k * outer.stride), staging_at(k * spacing, stretch));
        }
      } else {
        read_(bytes_at(begin), staging_at(0, span_of(staged)));
      }
      place(staged, target + i * outer.out_stride);
    }
  }

  std::span<std::byte> staging_at(std::int64_t begin, std::int64_t numel) {
    const auto end = static_cast<std::size_t>((begin + numel) * element_nbytes_);
    if (staging_.size() < end) staging_.resize(std::max(end, 2 * staging_.size()));
    return std::span(staging_).first(end).last(static_cast<std::size_t>(numel * element_nbytes_));
  }

  /// Copies the staged elements to `out`, in the order of `out`.
  void place(std::vector<Dim> dims, std::int64_t target) {
    std::sort(dims.begin(), dims.end(),
              [](const Dim& a, const Dim& b) { return a.out_stride > b.out_stride; });
    const std::byte* from = staging_.data();
    std::byte* to = out_.data() + target * element_nbytes_;
    switch (element_nbytes_) {
      case 1:
        return copy<1>(dims, from, to);
      case 2:
        return copy<2>(dims, from, to);
      case 4:
        return copy<4>(dims, from, to);
      case 8:
        return copy<8>(dims, from, to);
      case 16:
        return copy<16>(dims, from, to);
      default:
        TESSERA_CHECK(false && "element size");
    }
  }

  template <std::int64_t kNbytes>
  static void copy(std::span<const Dim> dims, const std::byte* from, std::byte* to) {
    const Dim& outer = dims.front();
    const std::int64_t from_stride = outer.stride * kNbytes;
    const std::int64_t to_stride = outer.out_stride * kNbytes;
    if (dims.size() == 2 && outer.stride < dims.back().stride) {
      return transpose<kNbytes>(outer, dims.back(), from, to);
    }
    if (dims.size() > 1) {
      for (std::int64_t i = 0; i < outer.size; ++i, from += from_stride, to += to_stride) {
        copy<kNbytes>(dims.subspan(1), from, to);
      }
    } else if (from_stride == kNbytes && to_stride == kNbytes) {
      std::memcpy(to, from, static_cast<std::size_t>(outer.size * kNbytes));
    } else {
      for (std::int64_t i = 0; i < outer.size; ++i, from += from_stride, to += to_stride) {
        std::memcpy(to, from, kNbytes);
      }
    }
  }

  // Copies in small tiles, so that each cache line of the source is read only once.
  template <std::int64_t kNbytes>
  static void transpose(const Dim& outer, const Dim& inner, const std::byte* from, std::byte* to) {
    constexpr std::int64_t kTile = 64 / kNbytes;
    for (std::int64_t tile = 0; tile < outer.size; tile += kTile) {
      const std::int64_t tile_end = std::min(tile + kTile, outer.size);
      for (std::int64_t k = 0; k < inner.size; ++k) {
        for (std::int64_t i = tile; i < tile_end; ++i) {
          std::memcpy(to + (i * outer.out_stride + k * inner.out_stride) * kNbytes,
                      from + (i * outer.stride + k * inner.stride) * kNbytes, kNbytes);
        }
      }
    }
  }

  std::uint64_t bytes_at(std::int64_t source) const {
    return static_cast<std::uint64_t>(source * element_nbytes_);
  }
  std::span<std::byte> out_at(std::int64_t target, std::int64_t numel) const {
    return out_.subspan(static_cast<std::size_t>(target * element_nbytes_),
                        static_cast<std::size_t>(numel * element_nbytes_));
  }

  std::int64_t element_nbytes_;
  std::span<std::byte> out_;
  const StorageRead& read_;
  std::vector<std::byte> staging_;
};

}  // namespace

void read_strided(const TensorRecord& tensor, FlatRange range, std::span<std::byte> out,
                  const StorageRead& read) {
  StridedRead reader(static_cast<std::int64_t>(itemsize(tensor.dtype)), out, read);
  const Shape out_strides = row_major_strides(tensor.shape);
  for (const Box& box : boxes_of(range, tensor.shape)) {
    std::int64_t source = tensor.storage_offset;
    std::int64_t target = -range.begin;
    std::vector<Dim> dims;
    for (std::size_t i = 0; i < box.sizes.size(); ++i) {
      source += box.offsets[i] * tensor.strides[i];
      target += box.offsets[i] * out_strides[i];
      dims.push_back({box.sizes[i], tensor.strides[i], out_strides[i]});
    }
    reader.read_box(std::move(dims), source, target);
  }
}

}  // namespace tessera::formats::torch_zip
