// This file owns variables of the environment in YAML of NeMo. OmegaConf writes them as
// ${oc.env:NAME} or ${oc.env:NAME,default}.

package launch

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/stowage-dev/stowage/plan/megatron"
)

var (
	nemoEnv    = regexp.MustCompile(`\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(,[^${}]*)?\}`)
	nemoDecode = regexp.MustCompile(`\$\{oc\.decode:([^${}]*)\}`)
)

// nemoNested bounds how often defaults hold variables in turn.
const nemoNested = 8

// fill returns a value of YAML in which variables have the values of env, or else their
// defaults. A variable that has neither stays. The file remembers which key got its value
// from which variable.
func (r *reader) fill(path string, v any, env map[string]string) any {
	switch v := v.(type) {
	case map[string]any:
		for key, inner := range v {
			v[key] = r.fill(strings.TrimPrefix(path+"."+key, "."), inner, env)
		}
	case []any:
		for i, inner := range v {
			v[i] = r.fill(path, inner, env)
		}
	case string:
		if strings.Contains(v, "${oc.") {
			return r.fillText(path, v, env)
		}
	}
	return v
}

func (r *reader) fillText(path, text string, env map[string]string) any {
	filled := text
	for range nemoNested {
		before := filled
		filled = nemoEnv.ReplaceAllStringFunc(filled, func(one string) string {
			m := nemoEnv.FindStringSubmatch(one)
			r.file.Reads[m[1]] = true
			if value, given := env[m[1]]; given {
				r.file.From[path] = m[1]
				return value
			}
			if m[2] == "" {
				return one
			}
			return strings.Trim(strings.TrimSpace(m[2][1:]), `"'`)
		})
		filled = nemoDecode.ReplaceAllString(filled, "$1")
		if filled == before {
			break
		}
	}
	if filled == text || strings.Contains(filled, "${") {
		return filled
	}
	if strings.EqualFold(filled, "null") || strings.EqualFold(filled, "none") {
		return nil
	}
	return scalar(filled)
}

// isUnset reports whether a value has a variable that neither a default nor the caller sets.
func isUnset(v any) bool {
	text, ok := v.(string)
	return ok && nemoEnv.MatchString(text)
}

// unset returns the error about such a value.
func unset(path string, v any) error {
	e := &megatron.Refused{Kind: "needs its environment", NoJob: true, Text: fmt.Sprintf("%s is %s: the variable is not set in the text", path, v)}
	for _, m := range nemoEnv.FindAllStringSubmatch(fmt.Sprint(v), -1) {
		e.Variables = append(e.Variables, m[1])
	}
	return e
}
