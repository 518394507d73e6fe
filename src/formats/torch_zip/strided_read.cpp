#include "formats/torch_zip/strided_read.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace tessera::formats::torch_zip {
namespace {

constexpr std::int64_t kStagingNbytes = std::int64_t{1} << 20;
constexpr std::int64_t kGapNbytes = std::int64_t{16} << 10;  // cheaper to read than to pass over

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

  /// `source` and `target` are the box's first element in the storage and in `out`.
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

  // Dims are in falling order of stride. Cuts the first ones until what is left spans little enough
  // of the storage to be read at once.
  void gather(std::span<const Dim> dims, std::int64_t source, std::int64_t target) {
    if (dims.empty()) return stage(dims, source, target);
    const Dim& outer = dims.front();
    const std::span<const Dim> inner = dims.subspan(1);
    if (inner.empty() && outer.stride == 1 && outer.out_stride == 1) {
      return read_(bytes_at(source), out_at(target, outer.size));
    }
    const std::int64_t inner_span = span_of(inner);
    const std::int64_t room = kStagingNbytes / element_nbytes_ - inner_span;
    const bool is_far = (outer.stride - inner_span) * element_nbytes_ > kGapNbytes;
    if (room < 0 || is_far) {
      for (std::int64_t i = 0; i < outer.size; ++i) {
        gather(inner, source + i * outer.stride, target + i * outer.out_stride);
      }
      return;
    }
    const std::int64_t step =
        outer.stride == 0 ? outer.size : std::min(outer.size, 1 + room / outer.stride);
    std::vector<Dim> part(dims.begin(), dims.end());
    for (std::int64_t i = 0; i < outer.size; i += step) {
      part.front().size = std::min(step, outer.size - i);
      stage(part, source + i * outer.stride, target + i * outer.out_stride);
    }
  }

  void stage(std::span<const Dim> dims, std::int64_t source, std::int64_t target) {
    const auto nbytes = static_cast<std::size_t>(span_of(dims) * element_nbytes_);
    if (staging_.size() < nbytes) staging_.resize(nbytes);
    read_(bytes_at(source), std::span(staging_).first(nbytes));
    std::vector<Dim> order(dims.begin(), dims.end());
    std::sort(order.begin(), order.end(),
              [](const Dim& a, const Dim& b) { return a.out_stride > b.out_stride; });
    const std::byte* from = staging_.data();
    std::byte* to = out_.data() + target * element_nbytes_;
    switch (element_nbytes_) {
      case 1:
        return scatter<1>(order, from, to);
      case 2:
        return scatter<2>(order, from, to);
      case 4:
        return scatter<4>(order, from, to);
      case 8:
        return scatter<8>(order, from, to);
      case 16:
        return scatter<16>(order, from, to);
      default:
        TESSERA_CHECK(false && "element size");
    }
  }

  template <std::int64_t kNbytes>
  static void scatter(std::span<const Dim> dims, const std::byte* from, std::byte* to) {
    if (dims.empty()) {
      std::memcpy(to, from, kNbytes);
      return;
    }
    const Dim& outer = dims.front();
    const std::int64_t from_step = outer.stride * kNbytes;
    const std::int64_t to_step = outer.out_stride * kNbytes;
    if (dims.size() > 1) {
      for (std::int64_t i = 0; i < outer.size; ++i, from += from_step, to += to_step) {
        scatter<kNbytes>(dims.subspan(1), from, to);
      }
    } else if (from_step == kNbytes && to_step == kNbytes) {
      std::memcpy(to, from, static_cast<std::size_t>(outer.size * kNbytes));
    } else {
      for (std::int64_t i = 0; i < outer.size; ++i, from += from_step, to += to_step) {
        std::memcpy(to, from, kNbytes);
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
