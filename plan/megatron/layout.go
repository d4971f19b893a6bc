// This file owns strings of --pipeline-model-parallel-layout: how they are read and
// written, and their stages.

package megatron

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/plan"
)

// piece is what one virtual stage holds, in the order in which it computes.
type piece struct {
	Embedding bool
	Layers    int
	MTP       int // depths
	Loss      bool
}

// mostStages bounds what a layout string may unroll to, so a mistyped factor is an error
// and does not fill memory. The largest jobs have a few hundred stages.
const mostStages, mostLayers = 4096, 1 << 16

// parseLayout reads a layout string such as "Et*3|(tt|)*29m|L". E is the embedding, t a
// decoder layer, m a depth of multi-token prediction, and L the loss. | ends a stage, and
// x*n and (...)*n repeat. Commas have no meaning. Backslashes are dropped, because they
// protect | and ( from the shells that a string has passed through.
func parseLayout(s string) ([]piece, error) {
	flat, err := unrollLayout(strings.NewReplacer(",", "", `\`, "", " ", "", `"`, "", "'", "").Replace(s))
	if err != nil {
		return nil, fmt.Errorf("--pipeline-model-parallel-layout %q: %w", s, err)
	}
	pieces := []piece{}
	for stage := range strings.SplitSeq(flat, "|") {
		p, err := readPiece(stage)
		if err != nil {
			return nil, fmt.Errorf("--pipeline-model-parallel-layout %q: %w", s, err)
		}
		pieces = append(pieces, p)
	}
	if err := checkPieces(pieces); err != nil {
		return nil, fmt.Errorf("--pipeline-model-parallel-layout %q: %w", s, err)
	}
	return pieces, nil
}

// unrollLayout writes repetitions out: first groups and then single characters, like
// Megatron-LM, so "(t*2|)*3" means the same.
func unrollLayout(s string) (string, error) {
	var err error
	for {
		open := strings.LastIndexByte(s, '(')
		if open < 0 {
			break
		}
		closing := strings.IndexByte(s[open:], ')')
		if closing < 0 {
			return "", fmt.Errorf("a '(' is not closed")
		}
		closing += open
		body, err := repeat(s[open+1 : closing])
		if err != nil {
			return "", err
		}
		count, rest, err := factor(s[closing+1:])
		if err != nil {
			return "", err
		}
		if len(body)*count > mostLayers {
			return "", fmt.Errorf("it unrolls to more than %d layers", mostLayers)
		}
		if s = s[:open] + strings.Repeat(body, count) + rest; len(s) > 2*mostLayers {
			return "", fmt.Errorf("it unrolls to more than %d layers", mostLayers)
		}
	}
	if s, err = repeat(s); err != nil {
		return "", err
	}
	if strings.Count(s, "|") >= mostStages {
		return "", fmt.Errorf("it has more than %d stages", mostStages)
	}
	return s, nil
}

// repeat unrolls x*n of single characters.
func repeat(s string) (string, error) {
	var out strings.Builder
	for len(s) > 0 {
		c := s[:1]
		count, rest, err := factor(s[1:])
		if err != nil {
			return "", err
		}
		if out.Len()+count > mostLayers {
			return "", fmt.Errorf("it unrolls to more than %d layers", mostLayers)
		}
		out.WriteString(strings.Repeat(c, count))
		s = rest
	}
	return out.String(), nil
}

// factor reads "*n" if s begins with it.
func factor(s string) (count int, rest string, err error) {
	if !strings.HasPrefix(s, "*") {
		return 1, s, nil
	}
	end := 1
	for end < len(s) && s[end] >= '0' && s[end] <= '9' {
		end++
	}
	count, err = strconv.Atoi(s[1:end])
	if err != nil || count > mostLayers {
		return 0, "", fmt.Errorf("a '*' must be followed by a number up to %d", mostLayers)
	}
	return count, s[end:], nil
}

func readPiece(s string) (p piece, err error) {
	for i, c := range s {
		switch {
		case c == 'E' && i == 0:
			p.Embedding = true
		case c == 't' && p.MTP == 0 && !p.Loss:
			p.Layers++
		case c == 'm' && !p.Loss:
			p.MTP++
		case c == 'L' && !p.Loss:
			p.Loss = true
		case strings.ContainsRune("EtmL", c):
			return p, fmt.Errorf("stage %q must hold E, then t, then m, then L, each in its place", s)
		default:
			return p, fmt.Errorf("%q is none of E (embedding), t (layer), m (MTP), L (loss) and |", string(c))
		}
	}
	return p, nil
}

func checkPieces(pieces []piece) error {
	last := len(pieces) - 1
	mtp := slices.IndexFunc(pieces, func(p piece) bool { return p.MTP > 0 })
	for i, p := range pieces {
		switch {
		case p.Embedding != (i == 0):
			return fmt.Errorf("the letter E must stand once, at the very beginning")
		case p.Loss != (i == last):
			return fmt.Errorf("the letter L must stand once, at the very end")
		case p.MTP > 0 && i != mtp:
			return fmt.Errorf("all m must stand in one stage")
		case p.Layers > 0 && mtp >= 0 && i > mtp:
			return fmt.Errorf("t must not come after m")
		}
	}
	return nil
}

// formatLayout writes pieces as the shortest plain string, with factors for runs within a
// stage and runs of equal stages.
func formatLayout(pieces []piece) string {
	var out strings.Builder
	for i := 0; i < len(pieces); {
		p, run := pieces[i], 1
		for i+run < len(pieces) && pieces[i+run] == p {
			run++
		}
		last := i+run == len(pieces)
		if last {
			run-- // the last stage has no | behind it
		}
		switch {
		case run > 2:
			fmt.Fprintf(&out, "(%s|)*%d", p, run)
		default:
			out.WriteString(strings.Repeat(p.String()+"|", run))
		}
		if last {
			out.WriteString(p.String())
			run++
		}
		i += run
	}
	return out.String()
}

// String returns the piece as written in a layout string.
func (p piece) String() string {
	s := ""
	if p.Embedding {
		s = "E"
	}
	s += times("t", p.Layers) + times("m", p.MTP)
	if p.Loss {
		s += "L"
	}
	return s
}

func times(c string, n int) string {
	if n <= 2 {
		return strings.Repeat(c, n)
	}
	return c + "*" + strconv.Itoa(n)
}

// stagesOf numbers the layers of the pieces.
func stagesOf(pieces []piece) []plan.Stage {
	stages := make([]plan.Stage, len(pieces))
	next := 0
	for i, p := range pieces {
		stages[i] = plan.Stage{Embedding: p.Embedding, First: next, Last: next + p.Layers, MTP: p.MTP > 0, Loss: p.Loss}
		next += p.Layers
	}
	return stages
}

// piecesOf is the inverse of stagesOf for a model with a number of depths of multi-token
// prediction.
func piecesOf(stages []plan.Stage, depth int) []piece {
	pieces := make([]piece, len(stages))
	for i, s := range stages {
		pieces[i] = piece{Embedding: s.Embedding, Layers: s.Last - s.First, Loss: s.Loss}
		if s.MTP {
			pieces[i].MTP = depth
		}
	}
	return pieces
}
