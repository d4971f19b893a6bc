// This file owns strings of --hybrid-layer-pattern: one letter a layer, | at the borders of
// pipeline stages, and / before each depth of multi-token prediction.

package megatron

import (
	"fmt"
	"strings"
)

// pattern is a hybrid's layers by letter.
type pattern struct {
	stages []string // a single one without any |
	mtp    string   // the layers of one depth
	depth  int
}

// parsePattern reads letters: M (Mamba), G (gated delta net), * (attention), +
// (MLA), - (dense feed-forward), E (experts).
func parsePattern(s string) (pattern, error) {
	parts := strings.Split(strings.ReplaceAll(s, `\`, ""), "/")
	p := pattern{stages: strings.Split(parts[0], "|")}
	for _, part := range parts[1:] {
		if part == "" {
			continue
		}
		if p.depth > 0 && part != p.mtp {
			return p, fmt.Errorf("--hybrid-layer-pattern %q: the depths %q and %q differ; all must be equal", s, p.mtp, part)
		}
		p.mtp, p.depth = part, p.depth+1
	}
	for _, c := range strings.Join(p.stages, "") + p.mtp {
		switch {
		case c == 'D':
			return p, refused(option, "--hybrid-layer-pattern %q: layers D (sparse attention) cannot be predicted yet; + is MLA without it", s)
		case !strings.ContainsRune("MG*+-E", c):
			return p, fmt.Errorf("--hybrid-layer-pattern %q: %q is no layer; the letters are M (Mamba), G (gated delta net), * (attention), + (MLA), - (feed-forward), E (experts), with | between stages and / before MTP", s, string(c))
		}
	}
	if p.layers() == "" {
		return p, fmt.Errorf("--hybrid-layer-pattern %q has no layers", s)
	}
	if len(p.layers()) > mostLayers || len(p.stages) > mostStages {
		return p, fmt.Errorf("--hybrid-layer-pattern has more than %d layers or %d stages", mostLayers, mostStages)
	}
	return p, nil
}

func (p pattern) layers() string { return strings.Join(p.stages, "") }

func (p pattern) String() string {
	return strings.Join(p.stages, "|") + strings.Repeat("/"+p.mtp, p.depth)
}
