#include "ckpt-inspect/json_members.h"

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

void write_aliases(JsonOutput& json, const formats::CheckpointContents& contents,
                   const inspect::Selection& selection) {
  if (selection.aliases.empty()) return;
  json.key("aliases").begin_array();
  for (const std::size_t a : selection.aliases) {
    const formats::Alias& alias = contents.aliases[a];
    json.begin_object().member("name", alias.fqn).member("alias_of", alias.target).end_object();
  }
  json.end_array();
}

std::string_view kind_name(inspect::Difference::Kind kind) {
  using Kind = inspect::Difference::Kind;
  switch (kind) {
    case Kind::missing:
      return "missing";
    case Kind::extra:
      return "extra";
    case Kind::shape:
      return "shape";
    case Kind::dtype:
      return "dtype";
    case Kind::elements:
      return "elements";
    case Kind::value:
      return "value";
    case Kind::type:
      return "type";
    case Kind::refused:
      return "refused";
  }
  return "";
}

void write_difference(JsonOutput& json, const inspect::Difference& difference) {
  using Kind = inspect::Difference::Kind;
  json.member("kind", kind_name(difference.kind)).member("name", difference.name);
  if (const auto& elements = difference.elements) {
    json.member("numel", elements->numel).member("different", elements->num_different);
    json.key("first_index").value(elements->first_index);
    json.member("first_a", elements->first_a).member("first_b", elements->first_b);
    json.member("nan_on_one_side", elements->num_nan_on_one_side).key("max_abs_difference");
    if (elements->max_abs_difference) {
      json.value(*elements->max_abs_difference);
    } else {
      json.null();
    }
  } else {
    if (difference.kind != Kind::extra) json.member("a", difference.a);
    if (difference.kind != Kind::missing) json.member("b", difference.b);
  }
}

}  // namespace tessera::cli
