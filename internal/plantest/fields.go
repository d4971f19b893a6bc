// This file owns setups as values by name, which tests compare.

package plantest

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan"
)

// Fields returns the values of a setup by their path. Of the model's layers it has the number, the
// first and the last.
func Fields(s *plan.Setup) map[string]string {
	text, err := json.Marshal(s)
	var tree map[string]any
	if err == nil {
		err = json.Unmarshal(text, &tree)
	}
	if err != nil {
		panic(err)
	}
	out := map[string]string{}
	walk("", tree, out)
	return out
}

func walk(path string, v any, out map[string]string) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			walk(strings.TrimPrefix(path+"."+k, "."), x, out)
		}
	case []any:
		if strings.HasSuffix(path, "ayers") && len(v) > 0 {
			out[path+".count"] = fmt.Sprint(len(v))
			walk(path+".first", v[0], out)
			walk(path+".last", v[len(v)-1], out)
			return
		}
		out[path] = fmt.Sprint(v)
	default:
		out[path] = fmt.Sprint(v)
	}
}

// Changes returns the values that differ from others, and the names of those that are gone.
func Changes(was, is map[string]string) string {
	var b strings.Builder
	for _, path := range slices.Sorted(maps.Keys(is)) {
		if is[path] != was[path] {
			fmt.Fprintf(&b, " %s=%s", path, is[path])
		}
	}
	for _, path := range slices.Sorted(maps.Keys(was)) {
		if _, there := is[path]; !there {
			fmt.Fprintf(&b, " -%s", path)
		}
	}
	return b.String()
}
