// This file owns Python's list expressions, which Megatron-LM accepts for layer
// frequencies: "([0]*3+[1]*11)", "[0,1]*2", or a plain number.

package megatron

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// layerPattern returns which of n layers are meant. A number f means every f-th from the
// first, and a list has an entry for each layer.
func layerPattern(flag, s string, n int) ([]bool, error) {
	s = strings.NewReplacer(" ", "", `\`, "", "'", "", `"`, "").Replace(s)
	if f, err := strconv.Atoi(s); err == nil {
		if f <= 0 {
			return nil, fmt.Errorf("--%s %d: the frequency must be positive", flag, f)
		}
		pattern := make([]bool, n)
		for i := 0; i < n; i += f {
			pattern[i] = true
		}
		return pattern, nil
	}
	p := listParser{rest: s}
	values, err := p.sum()
	if err == nil && p.rest != "" {
		err = fmt.Errorf("%q does not belong there", p.rest)
	}
	if err != nil {
		return nil, fmt.Errorf("--%s %q: %w", flag, s, err)
	}
	if len(values) != n {
		return nil, fmt.Errorf("--%s %q describes %d layers, but --num-layers is %d", flag, s, len(values), n)
	}
	pattern := make([]bool, n)
	for i, v := range values {
		if v != 0 && v != 1 {
			return nil, fmt.Errorf("--%s %q: layers are 0 or 1, not %d", flag, s, v)
		}
		pattern[i] = v == 1
	}
	return pattern, nil
}

// listParser reads sums of products of lists. rest is the unread text.
type listParser struct {
	rest  string
	depth int
}

func (p *listParser) accept(c byte) bool {
	if p.rest == "" || p.rest[0] != c {
		return false
	}
	p.rest = p.rest[1:]
	return true
}

func (p *listParser) sum() ([]int, error) {
	out, err := p.product()
	for err == nil && p.accept('+') {
		var more []int
		if more, err = p.product(); err == nil {
			out = append(out, more...)
		}
		if len(out) > mostLayers {
			return nil, fmt.Errorf("it has more than %d layers", mostLayers)
		}
	}
	return out, err
}

func (p *listParser) product() ([]int, error) {
	out, err := p.list()
	for err == nil && p.accept('*') {
		var n int
		if n, err = p.number(); err == nil {
			if n*len(out) > mostLayers {
				return nil, fmt.Errorf("it has more than %d layers", mostLayers)
			}
			out = slices.Repeat(out, n)
		}
	}
	return out, err
}

// mostNesting keeps a string of brackets from exhausting the stack.
const mostNesting = 64

func (p *listParser) list() (out []int, err error) {
	if p.depth++; p.depth > mostNesting {
		return nil, fmt.Errorf("its brackets are nested too deeply")
	}
	defer func() { p.depth-- }()
	if p.accept('(') {
		if out, err = p.sum(); err == nil && !p.accept(')') {
			err = fmt.Errorf("a ')' is missing")
		}
		return out, err
	}
	if !p.accept('[') {
		return nil, fmt.Errorf("a list such as [0]*3+[1]*11 is expected")
	}
	for !p.accept(']') {
		n, err := p.number()
		if err != nil {
			return nil, err
		}
		out = append(out, n)
		if !p.accept(',') && !strings.HasPrefix(p.rest, "]") {
			return nil, fmt.Errorf("a ']' is missing")
		}
	}
	return out, nil
}

func (p *listParser) number() (int, error) {
	end := 0
	for end < len(p.rest) && p.rest[end] >= '0' && p.rest[end] <= '9' {
		end++
	}
	n, err := strconv.Atoi(p.rest[:end])
	if err != nil || n > mostLayers {
		return 0, fmt.Errorf("a number up to %d is expected before %q", mostLayers, p.rest)
	}
	p.rest = p.rest[end:]
	return n, nil
}

// formatPattern is the inverse of [layerPattern]: runs as factors.
func formatPattern(pattern []bool) string {
	parts := []string{}
	for i := 0; i < len(pattern); {
		run := 1
		for i+run < len(pattern) && pattern[i+run] == pattern[i] {
			run++
		}
		v := 0
		if pattern[i] {
			v = 1
		}
		parts = append(parts, fmt.Sprintf("[%d]*%d", v, run))
		i += run
	}
	return "(" + strings.Join(parts, "+") + ")"
}
