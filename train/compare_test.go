// This file owns the tests that training learns: the loss is compared with what is known of
// the text itself. pytorch/bench/torch_train.py compares every step with another framework.

package train

import (
	"math"
	"testing"

	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/data"
)

// entropies are those of a text in nats a byte: of bytes by themselves, and of bytes if the
// one before is known. No model does better that looks at no more than that.
func entropies(t *testing.T) (alone, pairs float64) {
	t.Helper()
	c := testConfig(t, smallMoE())
	l, err := data.NewLoader(c.Text, data.LoaderConfig{Seq: c.Text.Len() - 1, Micro: 1, Microbatches: 1, Ranks: 1, Targets: 1})
	if err != nil {
		t.Fatal(err)
	}
	in, out := make([]uint32, c.Text.Len()-1), make([]uint32, c.Text.Len()-1)
	l.Batch(0, 0, 0, in, out)
	var one [256]float64
	var two [256][256]float64
	for i, b := range in {
		one[b]++
		two[b][out[i]]++
	}
	n := float64(len(in))
	for a := range one {
		if one[a] == 0 {
			continue
		}
		alone -= one[a] / n * math.Log(one[a]/n)
		for _, k := range two[a] {
			if k > 0 {
				pairs -= k / n * math.Log(k/one[a])
			}
		}
	}
	return alone, pairs
}

// learn trains a model on one rank and gives the mean loss of its last five steps.
func learn(t *testing.T, m *model.Model, b Batch, steps int) (mean float64) {
	t.Helper()
	c := testConfig(t, m)
	c.Layout, c.Batch = Layout{PP: 1, VPP: 1, EP: 1, DP: 1}, b
	const last = 5
	for _, x := range runConfig(t, c, steps).losses[steps-last:] {
		mean += x / last
	}
	t.Logf("%s: %.4f nats a byte after %d steps of %d tokens", m.Name, mean, steps, c.Tokens())
	return mean
}

// Every kind of layer learns more than the frequency of letters.
func TestModelsLearn(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector sees nothing in hundreds of steps that it does not in a few, and takes minutes")
	}
	alone, _ := entropies(t)
	// Tied to its embedding, a model this small stays with those frequencies for a hundred
	// steps, in other frameworks too.
	untied := smallDense()
	untied.Tied = false
	for _, m := range []*model.Model{smallMoE(), untied, smallHybrid(), smallDeepSeek()} {
		t.Run(m.Name, func(t *testing.T) {
			if got := learn(t, m, Batch{Micro: 8, Seq: 32, Microbatches: 1}, 70); !(got < alone-0.3) {
				t.Errorf("loss %.4f, and the frequencies of letters alone give %.4f", got, alone)
			}
		})
	}
}

// A mixture learns more than which letter follows which, so that attention brings
// something from further back.
func TestMixtureLearnsFromContext(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("takes some seconds, and minutes under the race detector")
	}
	_, pairs := entropies(t)
	if got := learn(t, smallMoE(), Batch{Micro: 16, Seq: 64, Microbatches: 1}, 160); !(got < pairs) {
		t.Errorf("loss %.4f, and the frequencies of pairs alone give %.4f", got, pairs)
	}
}
