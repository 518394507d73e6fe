#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tessera/base/error.h"

namespace tessera::test {

/// Matches a callable that throws an Error of kind `kind` whose message contains `text`:
/// `EXPECT_THAT([&] { open(path); }, ThrowsError(ErrorKind::corruption, "expected 8"))`.
inline auto ThrowsError(ErrorKind kind, const std::string& text) {
  return ::testing::Throws<Error>(
      ::testing::AllOf(::testing::Property("kind", &Error::kind, kind),
                       ::testing::Property("what", &Error::what, ::testing::HasSubstr(text))));
}

}  // namespace tessera::test
