#include "ckpt-inspect/json_parts.h"

namespace tessera::cli {
namespace {

void write_number(JsonOutput& json, const std::optional<inspect::Number>& number) {
  if (!number) {
    json.null();
  } else {
    std::visit([&](auto value) { json.value(value); }, *number);
  }
}

void write_double(JsonOutput& json, const std::optional<double>& number) {
  if (number) {
    json.value(*number);
  } else {
    json.null();
  }
}

}  // namespace

void write_region(JsonOutput& json, const Region& region) {
  json.begin_object();
  if (const auto* range = std::get_if<FlatRange>(&region)) {
    json.member("begin", range->begin).member("end", range->end);
  } else {
    const Box& box = std::get<Box>(region);
    json.key("offsets").value(box.offsets);
    json.key("sizes").value(box.sizes);
  }
  json.end_object();
}

void write_statistics(JsonOutput& json, const inspect::Statistics& statistics) {
  json.member("numel", statistics.numel).member("zeros", statistics.num_zeros);
  json.member("nan", statistics.num_nan).member("positive_inf", statistics.num_positive_inf);
  json.member("negative_inf", statistics.num_negative_inf);
  write_number(json.key("min"), statistics.min);
  write_number(json.key("max"), statistics.max);
  write_double(json.key("mean"), statistics.mean());
  write_double(json.key("std"), statistics.standard_deviation());
}

}  // namespace tessera::cli
