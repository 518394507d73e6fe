#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cli/terminal.h"

namespace tessera::cli {

/// Aligns rows of cells in columns, two spaces apart, without trailing spaces. On a terminal a
/// table that is too wide has one column cut in the middle; elsewhere nothing is ever cut.
class Table {
 public:
  enum class Align { left, right };
  struct Cell {
    std::string text;
    Style style = Style::plain;
  };

  explicit Table(std::vector<Align> columns) : columns_(std::move(columns)) {}

  /// Names the column that gives way where the terminal is too narrow.
  void let_shrink(std::size_t column) { shrinking_ = column; }
  /// Adds a row, which may have fewer cells than there are columns.
  void add_row(std::vector<Cell> cells) { rows_.push_back(std::move(cells)); }
  bool empty() const { return rows_.empty(); }
  void print(Terminal& terminal) const;

 private:
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::vector<Align> columns_;
  std::size_t shrinking_ = kNone;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace tessera::cli
