// Numbers in global memory that threads wait for. As clusters run one after the other, a number that another cluster
// has yet to make is never there: a deadlock, which names it.
#pragma once
#include <map>
#include "memory.h"
#include "order.h"

namespace engine {

struct GlobalNumber : Event {
  const u32* at;
  string waiting() const override { return text("in wait_global of a number that is %u", *at); }
};

inline std::map<const u32*, GlobalNumber> global_numbers;

inline GlobalNumber& global_number(const u32* at) {
  GlobalNumber& number = global_numbers[at];
  number.at = at;
  return number;
}

inline void wait_for_global(const u32* at, u32 value) {
  check_global("wait_global", at, 4, false);
  GlobalNumber& number = global_number(at);
  while (*at != value) sleep_until(number);
  maybe_leave_warp();
}

inline void add_to_global(u32* at, u32 x) {
  check_global("add_release_global", at, 4, true);
  *at += x;
  wake(global_number(at));
  maybe_leave_warp();
}

}  // namespace engine
