#include "reshard/cast_losses.h"

#include "base/float_text.h"

namespace tessera::reshard {

std::optional<OnOverflow> parse_on_overflow(std::string_view name) {
  if (name == "refuse") return OnOverflow::refuse;
  if (name == "saturate") return OnOverflow::saturate;
  if (name == "infinity") return OnOverflow::infinity;
  return std::nullopt;
}

std::string_view on_overflow_name(OnOverflow on_overflow) {
  switch (on_overflow) {
    case OnOverflow::refuse:
      return "refuse";
    case OnOverflow::saturate:
      return "saturate";
    case OnOverflow::infinity:
      return "infinity";
  }
  return "";
}

void CastLossesByTensor::add(std::size_t tensor_index, std::int64_t block,
                             const CastLosses& losses) {
  if (losses.num_too_large == 0 && losses.num_became_zero == 0) return;
  const std::lock_guard lock(mutex_);
  by_tensor_[tensor_index].merge(losses);
  if (losses.num_too_large == 0 || block >= first_block_) return;
  first_block_ = block;
  first_too_large_ = tensor_index;
}

TooLarge too_large_by(OnOverflow on_overflow) {
  return on_overflow == OnOverflow::saturate ? TooLarge::becomes_largest_finite
                                             : TooLarge::becomes_infinity;
}

Error overflow_error(const std::string& source_path, const std::string& fqn, DType to,
                     const CastLosses& losses) {
  using tessera::detail::float_to_text;
  return Error::expected(ErrorKind::mismatch, {source_path, fqn, {}}, "cast",
                         "finite numbers up to " + float_to_text(largest_finite(to)) +
                             ", the largest of " + std::string(dtype_name(to)),
                         std::to_string(losses.num_too_large) + " larger, up to " +
                             float_to_text(losses.largest_magnitude),
                         Remedy{Remedy::Action::allow_overflow, {}});
}

}  // namespace tessera::reshard
