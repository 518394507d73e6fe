#include "formats/torch_zip/simplifications.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>

namespace tessera::formats::torch_zip {

void note_flags(const TensorRecord& tensor, const std::string& name,
                std::vector<Simplification>& simplifications) {
  using Kind = Simplification::Kind;
  if (tensor.is_parameter || tensor.requires_grad) {
    simplifications.push_back({tensor.is_parameter ? Kind::parameter : Kind::requires_grad, name});
  }
  if (tensor.place) simplifications.push_back({Kind::dtensor, name});
  if (!tensor.attributes.empty()) {
    simplifications.push_back({Kind::attributes, name, tensor.attributes});
  }
}

void note_shared_memory(const SavedObject& saved,
                        std::span<const std::pair<std::string, const TensorRecord*>> tensors,
                        std::vector<Simplification>& simplifications) {
  std::map<std::size_t, std::vector<std::pair<ByteRange, std::size_t>>> by_storage;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const TensorRecord& record = *tensors[i].second;
    const ByteRange stored = saved.stored_range(record);
    if (!stored.empty()) by_storage[record.storage].emplace_back(stored, i);
  }
  for (auto& [storage, ranges] : by_storage) {
    std::ranges::sort(ranges, {}, [](const auto& tensor) {
      return std::tuple(tensor.first.begin, tensor.first.end, tensor.second);
    });
    std::uint64_t end = 0;
    for (const auto& [stored, tensor] : ranges) {
      if (stored.begin < end) {
        simplifications.push_back({Simplification::Kind::shared_memory, tensors[tensor].first});
      }
      end = std::max(end, stored.end);
    }
  }
}

}  // namespace tessera::formats::torch_zip
