#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "object_store/sigv4.h"

namespace tessera::object_store {

/// Returns the value of an environment variable; nothing if it is not set or empty.
using Environment = std::function<std::optional<std::string>(const std::string& name)>;
Environment environment_of_process();

/// The sections of an ini file such as `~/.aws/credentials`, each with its keys.
using ProfileFile = std::map<std::string, std::map<std::string, std::string>>;

/// Parses an ini file. Nested settings (indented lines) and lines that it does not know are left
/// out.
ProfileFile parse_profile_file(std::string_view text);

/// How to reach S3, as the user's environment and AWS's two files say.
struct S3Settings {
  std::optional<Credentials> credentials{};  // none: requests are not signed
  std::string credentials_source{};          // for messages: `AWS_ACCESS_KEY_ID`, `profile 'p'`
  std::string region{};                      // empty: not said anywhere
  std::string endpoint{};                    // empty: AWS
};

/// Reads AWS_ACCESS_KEY_ID and the others, or else the profile AWS_PROFILE in
/// AWS_SHARED_CREDENTIALS_FILE (`~/.aws/credentials`) and AWS_CONFIG_FILE (`~/.aws/config`).
/// Variables win over files. Throws: Error(invalid_argument) if AWS_PROFILE names no profile, or if
/// a key lacks its secret.
S3Settings read_s3_settings(const Environment& environment);

}  // namespace tessera::object_store
